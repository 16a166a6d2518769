"""KV blocks between hosts: who has the keys and the parameters of an export reads it once, and no other process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_engine_core.kv_transfer import nixl_agent, sealed_memory
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferLimits, TransferNetwork
from llmstack_engine_core.kv_transfer.nixl import NixlTransfer
from llmstack_engine_core.kv_transfer.tag import KVTransferError
from llmstack_types import EngineStartError

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs NIXL: llmstack-engine-core[nixl]"
)
DATA = bytes(range(256)) * 1024
TAG = b"tag"
Make = Callable[..., NixlTransfer]


def fill(out: memoryview) -> None:
    out[:] = DATA[: len(out)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Engine cores of one cluster, unless they have a key file of their own."""
    made: list[NixlTransfer] = []

    def new(role: str = "kv_both", key: str = "cluster.key", **limits: float) -> NixlTransfer:
        make_key_file(tmp_path / key)
        config = KVTransferConfig("NixlConnector", role, kv_connector_extra_config=TransferLimits(**limits))  # type: ignore[arg-type]  # by name
        made.append(NixlTransfer(config, TransferNetwork("lo", str(tmp_path / key))))
        return made[-1]

    yield new
    for one in made:
        one.close()


def exported(one: NixlTransfer, num_bytes: int = len(DATA)) -> str:
    handle = one.export_blocks(TAG, num_bytes, fill)
    assert handle is not None
    return handle


@needs_nixl
def test_blocks_arrive_once_and_only_where_everything_is_equal(make: Make) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    first, other = exported(producer), exported(producer, 4096)
    for wrong, reason in (
        ((first[:-1] + "x", TAG, len(DATA)), "no export of this cluster"),
        (("0" * 32 + first[32:], TAG, len(DATA)), "no export of this cluster"),
        ((first, TAG, 4096), "differs in size"),
        ((first, b"another", len(DATA)), "no such export"),
        ((first, TAG, 1 << 40), "exceed max_bytes"),
    ):
        with pytest.raises(KVTransferError, match=reason):
            consumer.import_blocks(producer.engine_id, *wrong)
    for handle, num_bytes in ((first, len(DATA)), (other, 4096)):
        assert bytes(consumer.import_blocks(producer.engine_id, handle, TAG, num_bytes)) == DATA[:num_bytes]
        with pytest.raises(KVTransferError, match="no such export"):
            consumer.import_blocks(producer.engine_id, handle, TAG, num_bytes)
    assert (producer.num_exports(), consumer.export_blocks(TAG, 1, fill)) == (0, None)


@needs_nixl
def test_no_client_can_name_an_address_to_connect_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    monkeypatch.setattr(consumer, "_channel", lambda address: pytest.fail("it connects"))
    handle = exported(producer)
    for engine_id in (f"{producer.engine_id[:32]}@127.0.0.1:1", "", "x" * 128, producer.engine_id + "1"):
        with pytest.raises(KVTransferError, match="no export of this cluster"):
            consumer.import_blocks(engine_id, handle, TAG, len(DATA))


@needs_nixl
def test_who_has_other_keys_reads_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, stranger = make("kv_producer"), make("kv_consumer", key="other.key", import_timeout_s=1.0)
    handle = exported(producer)
    with pytest.raises(KVTransferError, match="no export of this cluster"):
        stranger.import_blocks(producer.engine_id, handle, TAG, len(DATA))
    address = "tcp://" + producer.engine_id.partition("@")[2]
    monkeypatch.setattr(stranger, "_checked_names", lambda *names: (address, handle[:32]))
    with pytest.raises(KVTransferError, match="does not answer"):
        stranger.import_blocks(producer.engine_id, handle, TAG, len(DATA))
    assert producer.num_exports() == 1


@needs_nixl
def test_damaged_bytes_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make()
    monkeypatch.setattr(sealed_memory, "checksum_of", lambda descriptor, num_bytes: 1)
    with pytest.raises(KVTransferError, match="damaged"):
        one.import_blocks(one.engine_id, exported(one), TAG, len(DATA))


@needs_nixl
def test_a_read_that_takes_too_long_ends_and_the_next_one_works(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make("kv_producer", import_timeout_s=0.5), make("kv_consumer", import_timeout_s=1.0)
    with monkeypatch.context() as stopped:
        stopped.setattr(nixl_agent.NixlAgent, "progress", lambda agent: None)
        with pytest.raises(KVTransferError, match=r"too late|cannot read"):
            consumer.import_blocks(producer.engine_id, exported(producer), TAG, len(DATA))
    server, consumer._limits = producer._server, dataclasses.replace(consumer._limits, import_timeout_s=60.0)
    assert server is not None
    while server._readings or server._late:  # its memory is freed when no agent can read it any more
        time.sleep(0.01)
    server._limits = consumer._limits
    assert bytes(consumer.import_blocks(producer.engine_id, exported(producer), TAG, len(DATA))) == DATA


@needs_nixl
def test_connections_do_not_grow_in_number_with_imports(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MAX_READS", 4)
    one = make()
    counts = []
    for number in range(24):
        size = 4096 * (1 + number % 3)
        assert bytes(one.import_blocks(one.engine_id, exported(one, size), TAG, size)) == DATA[:size]
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[12:]) <= max(counts[:12]) + 2


CHILD = """
import json, socket, sys
from pathlib import Path
import psutil
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferNetwork
from llmstack_engine_core.kv_transfer.nixl import NixlTransfer
one = NixlTransfer(KVTransferConfig("NixlConnector"), TransferNetwork("lo", sys.argv[1]))
handle = one.export_blocks(b"tag", 4096, lambda out: out.__setitem__(slice(None), bytes(range(256)) * 16))
before = sum(psutil.Process().cpu_times()[:2])
listening = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
print(json.dumps([one.engine_id, handle, listening]), flush=True)
sys.stdin.readline()
print(sum(psutil.Process().cpu_times()[:2]) - before, flush=True)
sys.stdin.read()
"""


@needs_nixl
def test_another_process_hands_out_on_the_interface_alone_and_sleeps_meanwhile(make: Make, tmp_path: Path) -> None:
    consumer = make("kv_consumer")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "cluster.key")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        engine_id, handle, listening = json.loads(child.stdout.readline())
        assert set(listening) == {"127.0.0.1"}
        time.sleep(0.5)  # a thread that spins would need most of it
        print(file=child.stdin, flush=True)
        assert float(child.stdout.readline()) < 0.25
        assert bytes(consumer.import_blocks(engine_id, handle, TAG, 4096)) == DATA[:4096]
        child.kill()
        consumer._limits = dataclasses.replace(consumer._limits, import_timeout_s=0.5)
        with pytest.raises(KVTransferError, match=r"does not answer|cannot be reached"):
            consumer.import_blocks(engine_id, handle, TAG, 4096)


def test_without_nixl_the_start_says_what_to_install(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(EngineStartError, match=r"pip install 'llmstack-engine-core\[nixl\]'"):
        make("kv_consumer")


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    make_key_file(tmp_path / "key")
    with pytest.raises(EngineStartError, match="--trust-cluster-network cable9: this machine has no such network"):
        NixlTransfer(KVTransferConfig("NixlConnector"), TransferNetwork("cable9", str(tmp_path / "key")))
