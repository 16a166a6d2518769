"""Encryption: contexts from files, errors that name the file, and certificates that change while a server runs."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import TLSConfig
from llmstack_server.serving.server import Server
from llmstack_server.serving.sockets import bind_socket
from llmstack_server.serving.tls import make_tls_context, refresh_certificates
from llmstack_server.state.lifecycle import Lifecycle, LifecycleState
from llmstack_server.testing import FakeEngineClient, ready_state


def test_a_context_refuses_old_protocols_and_asks_for_no_certificate_by_default(make_certificate: Any):
    context = make_tls_context(TLSConfig(*make_certificate("a")))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


def test_clients_certificates_can_be_demanded(make_certificate: Any):
    certificate, key = make_certificate("a")
    context = make_tls_context(TLSConfig(certificate, key, ca_certs=certificate, cert_reqs=2))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


def test_ciphers_are_those_asked_for(make_certificate: Any):
    context = make_tls_context(TLSConfig(*make_certificate("a"), ciphers="ECDHE-ECDSA-AES128-GCM-SHA256"))
    older = [cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
    assert older == ["ECDHE-ECDSA-AES128-GCM-SHA256"]


@pytest.mark.parametrize("field", ["certfile", "keyfile", "ca_certs"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_that_cannot_be_used_is_named_with_its_flag(
    make_certificate: Any, tmp_path: Path, field: str, content: str | None
):
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_text(content)
    certificate, key = make_certificate("a")
    fields = {"certfile": certificate, "keyfile": key, "ca_certs": certificate} | {field: str(bad)}
    with pytest.raises(ServeError, match=rf"--ssl-{field.replace('_', '-')} \S*bad.pem") as caught:
        make_tls_context(TLSConfig(**fields))
    assert caught.value.exit_code == 2


def test_the_key_of_another_certificate_is_refused(make_certificate: Any):
    with pytest.raises(ServeError, match="not a certificate and its key"):
        make_tls_context(TLSConfig(make_certificate("a")[0], make_certificate("b")[1]))


def test_unknown_ciphers_are_refused(make_certificate: Any):
    with pytest.raises(ServeError, match="--ssl-ciphers 'nonsense'"):
        make_tls_context(TLSConfig(*make_certificate("a"), ciphers="nonsense"))


async def served_name(port: int) -> str:
    """The name in the certificate that a server shows."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return next(name for name in ("old", "new") if name.encode() in certificate)


def write(path: str, content: str) -> None:
    Path(path).write_text(content)


async def test_changed_files_are_read_again_and_unusable_ones_leave_the_old_in_use(
    make_certificate: Any, caplog: pytest.LogCaptureFixture
):
    def num_lines(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    caplog.set_level("INFO", "llmstack_server.serving.tls")  # a test that serves may have set the package's level
    old, new = make_certificate("old"), make_certificate("new")
    config = TLSConfig(*old, is_refreshed=True)
    context = make_tls_context(config)
    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    refreshing = asyncio.create_task(refresh_certificates(context, config, interval_s=0.005))
    try:
        assert await served_name(port) == "old"
        write(old[0], "broken")
        await wait_until(lambda: num_lines("stays in use") == 1)
        assert await served_name(port) == "old"
        os.replace(new[0], old[0])  # with the old key, which does not fit
        await wait_until(lambda: num_lines("stays in use") == 2)
        assert await served_name(port) == "old"
        os.replace(new[1], old[1])
        await wait_until(lambda: num_lines("was read again") == 1)
        assert await served_name(port) == "new"
    finally:
        refreshing.cancel()
        server.close()
        await asyncio.gather(refreshing, return_exceptions=True)


async def test_a_hangup_lets_a_server_read_its_certificates_again_and_serve_on(make_certificate: Any):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    old, new = make_certificate("old"), make_certificate("new")
    state = ready_state(FakeEngineClient(), HTTPConfig(uvicorn_log_level="critical", tls=TLSConfig(*old)))
    state.lifecycle = Lifecycle()
    state.lifecycle.advance(LifecycleState.LOADING_MODEL)
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    is_ready = asyncio.Event()

    async def on_ready() -> None:
        is_ready.set()

    serving = asyncio.create_task(Server(state, listener).run(on_ready))
    try:
        await asyncio.wait([serving, asyncio.ensure_future(is_ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert await served_name(port) == "old"
        os.replace(new[0], old[0])
        os.replace(new[1], old[1])
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(200):
            if await served_name(port) == "new":
                break
        assert await served_name(port) == "new"
        assert state.lifecycle.is_ready
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        signal.signal(signal.SIGHUP, before)
