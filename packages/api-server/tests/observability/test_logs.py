"""Lines that the log leaves out."""

from __future__ import annotations

import logging

import pytest

from llmstack_server.observability.logs import leave_out_paths


@pytest.mark.parametrize(
    ("path", "is_logged"),
    [("/health", False), ("/health?x=1", False), ("/metrics", False), ("/healthy", True), ("/v1/models", True)],
)
def test_requests_to_named_paths_leave_no_line(
    path: str, is_logged: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(logger, "filters", [])
    leave_out_paths("/health, /metrics")
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        logger.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
        logger.info("something else")
    assert [record.getMessage() for record in caplog.records if path in record.getMessage()] == (
        [f'127.0.0.1:1 - "GET {path} HTTP/1.1" 200'] if is_logged else []
    )
    assert caplog.records[-1].getMessage() == "something else"
