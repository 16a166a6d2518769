"""Exports are few, small and short; none outlives its process, and no damaged one is read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_engine_core.kv_transfer import sealed_memory
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferLimits
from llmstack_engine_core.kv_transfer.shared_memory import SharedMemoryTransfer
from llmstack_engine_core.kv_transfer.tag import KVTransferError

DATA = bytes(range(256)) * 64
TAG = b"tag"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def transfer(clock: Clock | None = None, role: str = "kv_both", **limits: float) -> SharedMemoryTransfer:
    config = KVTransferConfig("SharedMemoryConnector", role, kv_connector_extra_config=TransferLimits(**limits))  # type: ignore[arg-type]  # by name
    return SharedMemoryTransfer(config, clock or Clock())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def both(clock: Clock) -> Iterator[SharedMemoryTransfer]:
    one = transfer(clock, max_bytes=2 * len(DATA), max_exports=3, time_to_live_s=60.0)
    yield one
    one.close()


def fill(out: memoryview) -> None:
    out[:] = DATA[: len(out)]


def export(one: SharedMemoryTransfer, num_bytes: int = len(DATA)) -> str:
    handle = one.export_blocks(TAG, num_bytes, fill)
    assert handle is not None
    return handle


def imported(one: SharedMemoryTransfer, handle: str, tag: bytes = TAG, num_bytes: int = len(DATA)) -> bytes:
    return bytes(one.import_blocks(one.engine_id, handle, tag, num_bytes))


def test_bytes_arrive_once_and_handles_are_128_random_bits(both: SharedMemoryTransfer) -> None:
    handles = [export(both), export(both)]
    assert {len(bytes.fromhex(handle)) for handle in handles} == {16}
    assert len(set(handles)) == 2
    assert [imported(both, handle) for handle in handles] == [DATA, DATA]
    assert both.num_exports() == 0
    with pytest.raises(KVTransferError, match="no such export"):
        imported(both, handles[0])


def test_exports_are_bounded_in_bytes_and_in_number(both: SharedMemoryTransfer) -> None:
    first = export(both)
    export(both)
    assert both.export_blocks(TAG, 1, fill) is None  # the bytes
    imported(both, first)
    for _ in range(2):
        export(both, 1)
    assert both.export_blocks(TAG, 1, fill) is None  # the number
    assert both.export_blocks(TAG, 0, fill) is None  # there is nothing


def test_an_export_expires_and_makes_room(both: SharedMemoryTransfer, clock: Clock) -> None:
    handles = [export(both), export(both)]
    clock.now_s += 61.0
    with pytest.raises(KVTransferError, match="no such export"):
        imported(both, handles[0])
    assert both.num_exports() == 0
    export(both)


def test_what_cannot_be_filled_takes_no_room(both: SharedMemoryTransfer) -> None:
    def fails(out: memoryview) -> None:
        raise OSError(5, "made to fail")

    for _ in range(8):
        assert both.export_blocks(TAG, len(DATA), fails) is None
    assert imported(both, export(both)) == DATA


def test_a_size_that_differs_is_refused_and_the_export_stays(both: SharedMemoryTransfer) -> None:
    handle = export(both)
    with pytest.raises(KVTransferError, match="differs in size"):
        imported(both, handle, num_bytes=len(DATA) - 1)
    with pytest.raises(KVTransferError, match="exceed max_bytes"):
        imported(both, handle, num_bytes=1 << 40)
    assert imported(both, handle) == DATA


def test_damaged_bytes_are_refused(both: SharedMemoryTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_memory, "checksum_of", lambda descriptor, num_bytes: 1)
    with pytest.raises(KVTransferError, match="damaged"):
        imported(both, export(both))


def test_memory_that_is_truncated_or_may_change_is_refused(
    both: SharedMemoryTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsealed(num_bytes: int, fill: object) -> int:
        descriptor = os.memfd_create("test")
        os.truncate(descriptor, num_bytes)
        return descriptor

    monkeypatch.setattr(sealed_memory, "filled", unsealed)
    with pytest.raises(KVTransferError, match="may still change"):
        imported(both, export(both))


def test_a_process_of_another_user_gets_nothing(both: SharedMemoryTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, own_user = export(both), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own_user + 1)
    with pytest.raises(KVTransferError, match="another user"):
        imported(both, handle)
    monkeypatch.undo()
    assert imported(both, handle) == DATA


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x01\x00\x00\x00\x90"])
def test_a_peer_that_sends_nonsense_does_not_end_the_server(both: SharedMemoryTransfer, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(f"\0llmstack-kv-{both.engine_id}")
        peer.sendall(sent)
    assert imported(both, export(both)) == DATA


def test_a_peer_that_says_nothing_is_late(both: SharedMemoryTransfer) -> None:
    silent = transfer(import_timeout_s=0.05)
    name = "\0llmstack-kv-silent-" + both.engine_id
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(1)
        with pytest.raises(KVTransferError, match="cannot be reached"):
            silent.import_blocks("silent-" + both.engine_id, "h", TAG, 1)
    silent.close()


def test_a_consumer_keeps_no_socket_and_exports_nothing() -> None:
    one = transfer(role="kv_consumer")
    assert one.export_blocks(TAG, len(DATA), fill) is None
    with pytest.raises(KVTransferError, match="cannot be reached"):
        imported(one, "h")
    one.close()


def test_closing_frees_the_memory_and_can_be_repeated(clock: Clock) -> None:
    one = transfer(clock)
    before = len(os.listdir("/proc/self/fd"))
    handle = export(one)
    one.close()
    one.close()
    assert len(os.listdir("/proc/self/fd")) < before
    with pytest.raises(KVTransferError):
        imported(one, handle)


CHILD = """
import sys, time
from llmstack_engine_core.kv_transfer.config import KVTransferConfig
from llmstack_engine_core.kv_transfer.shared_memory import SharedMemoryTransfer
one = SharedMemoryTransfer(KVTransferConfig("SharedMemoryConnector"))
print(one.engine_id, one.export_blocks(b"tag", 16, lambda out: None), flush=True)
sys.stdin.read()
"""


def named_memory_of(pid: int) -> list[str]:
    """Files in `/dev/shm` that a process has open or mapped; other processes of the machine have theirs there too."""
    opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [entry for entry in [*opened, *mapped] if "/dev/shm/" in entry]


def test_a_killed_process_leaves_neither_memory_nor_socket(both: SharedMemoryTransfer) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine_id, handle = child.stdout.readline().split()
    named = named_memory_of(child.pid)
    assert bytes(both.import_blocks(engine_id, handle, TAG, 16)) == bytes(16)  # across processes
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    with pytest.raises(KVTransferError, match="cannot be reached"):
        both.import_blocks(engine_id, handle, TAG, 16)
    assert engine_id not in Path("/proc/net/unix").read_text()
    assert named == []  # what has no name ends with those who use it
