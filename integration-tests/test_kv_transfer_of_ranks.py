"""KV blocks of several ranks, computed by one engine core and used by another, change no token."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parallel_helpers.families import write_family

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferNetwork
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.launcher import ProcessPeers
from llmstack_parallel.runner import ParallelRunner
from llmstack_types import EngineCoreOutput, EngineCoreRequest, KVTransferParams, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPT = [(7 * i + 3) % 90 for i in range(40)]
NUM_EXPORTED_TOKENS = 32
NUM_TOKENS = 8
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs NIXL: llmstack-engine-core[nixl]"
)
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), "llama")


@contextmanager
def engine(folder: Path, network: TransferNetwork | None = None, **sizes: int) -> Iterator[EngineCore]:
    """With `network` the blocks are read by NIXL."""
    model = ModelRunnerConfig(str(folder), device="cpu", dtype="float32", **LIMITS, **sizes)
    config = EngineConfig(
        model,
        runner="parallel" if sizes else "default",
        scheduler=SchedulerConfig(**LIMITS, pipeline_parallel_size=sizes.get("pipeline_parallel_size", 1)),
        num_blocks=32,
        kv_transfer=KVTransferConfig("NixlConnector" if network else "SharedMemoryConnector", "kv_both"),
        kv_transfer_network=network,
    )
    core = build_engine_core(config)
    try:
        yield core
    finally:
        core.shutdown()


def run(core: EngineCore, max_tokens: int, kv_transfer: KVTransferParams | None = None) -> list[EngineCoreOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=7, ignore_eos=True)
    core.add_request(EngineCoreRequest("request", list(PROMPT), params, kv_transfer=kv_transfer))
    outputs: list[EngineCoreOutput] = []
    while core.has_unfinished_requests():
        outputs += core.step().outputs
    return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def export(core: EngineCore) -> KVTransferParams:
    found = run(core, 1, KVTransferParams(do_remote_decode=True))[-1].kv_transfer
    assert found is not None
    return found


CASES = pytest.mark.parametrize(
    ("sizes", "other", "num_imported"),
    [
        (TP2, TP2, NUM_EXPORTED_TOKENS),
        # The blocks of stages are those of one process.
        pytest.param(PP2, {}, NUM_EXPORTED_TOKENS, marks=pytest.mark.full),
        pytest.param({}, PP2, NUM_EXPORTED_TOKENS, marks=pytest.mark.full),
        # Other parts and other bits: the prompt is computed.
        pytest.param(TP2, {}, 0, marks=pytest.mark.full),
        pytest.param(TP2 | PP2, TP2 | PP2, NUM_EXPORTED_TOKENS, marks=pytest.mark.full),
        pytest.param(TP2 | PP2, TP2, 0, marks=pytest.mark.full),
        pytest.param({}, TP2, 0, marks=pytest.mark.full),
    ],
    ids=str,
)


@CASES
def test_blocks_of_ranks_are_imported_where_they_fit(
    sizes: dict[str, Any], other: dict[str, Any], num_imported: int, checkpoint: Path
) -> None:
    with engine(checkpoint, **sizes) as producer, engine(checkpoint, **other) as consumer:
        expected = tokens(run(consumer, NUM_TOKENS))
        assert consumer.reset_prefix_cache()
        outputs = run(consumer, NUM_TOKENS, export(producer))
        assert (tokens(outputs), outputs[0].num_cached_tokens) == (expected, num_imported)


@pytest.fixture
def network(tmp_path: Path) -> TransferNetwork:
    make_key_file(tmp_path / "cluster.key")
    return TransferNetwork("lo", str(tmp_path / "cluster.key"))


@pytest.mark.full
@needs_nixl
@CASES
def test_nixl_reads_blocks_of_ranks_where_they_fit(
    sizes: dict[str, Any], other: dict[str, Any], num_imported: int, checkpoint: Path, network: TransferNetwork
) -> None:
    with engine(checkpoint, network, **sizes) as producer, engine(checkpoint, network, **other) as consumer:
        expected = tokens(run(consumer, NUM_TOKENS))
        assert consumer.reset_prefix_cache()
        for _ in range(2):  # each export is read once
            outputs = run(consumer, NUM_TOKENS, export(producer))
            assert (tokens(outputs), outputs[0].num_cached_tokens) == (expected, num_imported)
            assert consumer.reset_prefix_cache()


@pytest.mark.full
@needs_nixl
def test_an_export_whose_engine_core_has_ended_is_a_computation_and_another_rank_serves_on(
    checkpoint: Path, network: TransferNetwork
) -> None:
    with engine(checkpoint, network, **TP2) as consumer:
        expected = tokens(run(consumer, NUM_TOKENS))
        assert consumer.reset_prefix_cache()
        with engine(checkpoint, network, **TP2) as producer:
            exported = export(producer)
        outputs = run(consumer, NUM_TOKENS, exported)
        assert (tokens(outputs), outputs[0].num_cached_tokens) == (expected, 0)


def test_a_rank_that_is_lost_in_an_export_ends_the_engine_core(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ParallelRunner.read_kv_blocks

    def lose_a_rank_and_read(runner: ParallelRunner, *arguments: Any) -> None:
        peers = runner._started[0]
        assert isinstance(peers, ProcessPeers)
        for pid in peers.pids().values():
            os.kill(pid, signal.SIGKILL)
        read(runner, *arguments)

    monkeypatch.setattr(ParallelRunner, "read_kv_blocks", lose_a_rank_and_read)
    with engine(checkpoint, **TP2) as core, pytest.raises(LostRankError, match="rank 1"):
        export(core)
