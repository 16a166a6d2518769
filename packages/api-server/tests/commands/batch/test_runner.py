"""Requests in flight, faults between them, and servers that are busy or gone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchAnswer, BatchFault, BatchRequest
from llmstack_server.apis.batches.output import BatchOutput
from llmstack_server.apis.batches.transport import TransportError
from llmstack_server.commands.batch.runner import BatchRunner

REQUESTS = [BatchRequest(number, f"id-{number}", "/x", b"{}") for number in range(1, 21)]


class FakeTransport:
    """Answers after a few turns of the loop; `script` holds what comes first: statuses or errors."""

    def __init__(self, *script: int | Exception) -> None:
        self.script = list(script)
        self.sent: list[str] = []
        self.num_in_flight = self.max_in_flight = 0

    async def send(self, request: BatchRequest) -> BatchAnswer:
        self.sent.append(request.custom_id)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            for _ in range(request.line % 3):
                await asyncio.sleep(0)
            step = self.script.pop(0) if self.script else 200
        finally:
            self.num_in_flight -= 1
        if isinstance(step, Exception):
            raise step
        return BatchAnswer(step, "r", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def run(transport: FakeTransport, path: Path, items: list[Any], max_concurrency: int = 4) -> BatchRunner:
    output = BatchOutput.open(str(path))
    try:
        runner = BatchRunner(transport, output, lambda: None, retry_delays_s=(0.0, 0.0))
        await runner.run(items, max_concurrency)
        return runner
    finally:
        output.close()


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_request_is_answered_once_and_few_at_a_time(path: Path):
    transport = FakeTransport()
    runner = await run(transport, path, REQUESTS)
    assert sorted(line["custom_id"] for line in written(path)) == sorted(request.custom_id for request in REQUESTS)
    assert transport.max_in_flight == 4
    assert str(runner.counts) == "20 answered"


async def test_what_is_in_the_output_is_not_asked_again(path: Path):
    await run(FakeTransport(), path, REQUESTS[:5])
    transport = FakeTransport()
    runner = await run(transport, path, REQUESTS)
    assert sorted(transport.sent) == sorted(request.custom_id for request in REQUESTS[5:])
    assert str(runner.counts) == "15 answered, 5 already in the output"
    assert len(written(path)) == 20


async def test_faults_and_refusals_stop_nothing(path: Path):
    fault = BatchFault(2, None, "invalid_json_line", "no")
    runner = await run(FakeTransport(400), path, [REQUESTS[0], fault, REQUESTS[2]], max_concurrency=1)
    first, second, third = written(path)
    assert first["response"]["status_code"] == 400
    assert second["error"]["line"] == 2
    assert third["response"]["status_code"] == 200
    assert str(runner.counts) == "1 answered, 1 answered with an error, 1 wrong lines"


@pytest.mark.parametrize(
    "script", [(503, 429), (TransportError("reset"), 503), (TransportError("a"), TransportError("b"))]
)
async def test_a_busy_server_is_asked_again(path: Path, script: tuple[Any, ...]):
    transport = FakeTransport(*script)
    await run(transport, path, REQUESTS[:1])
    assert transport.sent == ["id-1"] * 3
    assert written(path)[0]["response"]["status_code"] == 200


async def test_a_server_that_stays_busy_has_said_so(path: Path):
    await run(FakeTransport(503, 503, 503), path, REQUESTS[:1])
    assert written(path)[0]["response"]["status_code"] == 503


async def test_a_server_that_is_gone_ends_the_run_and_a_later_one_goes_on(path: Path):
    with pytest.raises(BatchError, match="no answer"):
        await run(FakeTransport(200, 200, *[TransportError("refused")] * 99), path, REQUESTS, max_concurrency=1)
    assert len(written(path)) == 2
    await run(FakeTransport(), path, REQUESTS)
    assert len(written(path)) == 20
