"""Replicas: the requests of one that dies go on in another that computes the same bits, and in no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_client_helpers.scripted import OTHER, READY, Engine, SpokenTo

from llmstack_engine_client import BalancedClient, RecoveringClient
from llmstack_engine_core.contract import numeric_contract_id
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineReady,
    EngineStartError,
    ModelRunnerConfig,
    QuarantinedError,
    SamplingParams,
)


class Replicas(SpokenTo):
    """Replicas with all engine cores that each of them had, and what they said."""

    def __init__(self, *readies: EngineReady | None, max_restarts: int = 3, **options: Any) -> None:
        super().__init__()
        self.engines: list[list[Engine]] = [[] for _ in readies]

        def starter(index: int) -> Callable[[], Engine]:
            def start() -> Engine:  # a replacement is ready when the test says so
                self.engines[index].append(Engine(None if self.engines[index] else readies[index]))
                return self.engines[index][-1]

            return start

        clients = [RecoveringClient(starter(index), max_restarts) for index in range(len(readies))]
        self.client = BalancedClient(clients, **options)


async def test_requests_of_a_dead_replica_go_on_in_another_one_before_its_replacement_is_ready() -> None:
    replicas = Replicas(READY, READY)
    await replicas.client.wait_until_ready()
    await replicas.add("r0", "r1")
    first, other = replicas.engines[1][0], replicas.engines[0][0]
    first.say("r1", 5, 6)
    await replicas.read_until(lambda: "r1" in replicas.tokens)
    first.die()
    await replicas.read_until(lambda: "r1" in other.requests)
    assert other.requests["r1"].output_token_ids == (5, 6)
    first.say("r1", 9)  # it comes too late: the connection is closed
    other.say("r1", 7, is_end=True)
    await replicas.read_until(lambda: "r1" in replicas.ends)
    assert replicas.tokens["r1"] == [5, 6, 7]
    assert not replicas.client.is_recovering  # the other one serves
    await replicas.add("r2")
    assert "r2" in other.requests
    replicas.engines[1][1].deliver(READY)
    await replicas.read_until(lambda: all(client.is_available for client in replicas.client._clients))
    await replicas.add("r3")
    assert "r3" in replicas.engines[1][1].requests
    await replicas.client.abort_requests(["r2"])
    await replicas.client.shutdown()


async def test_a_beam_search_moves_as_a_whole_or_not_at_all() -> None:
    replicas = Replicas(READY, READY)
    await replicas.client.wait_until_ready()
    await replicas.add("busy")
    beam = SamplingParams(max_tokens=8, n=2, use_beam_search=True, temperature=0.0)
    await replicas.client.add_request(EngineCoreRequest("b0", [5, 6, 7], beam))
    await replicas.client.add_request(EngineCoreRequest("b1", [5, 6, 7], beam, fork_of="b0"))
    assert set(replicas.engines[1][0].requests) == {"b0", "b1"}
    replicas.engines[1][0].die()
    other = replicas.engines[0][0]
    await replicas.read_until(lambda: len(other.requests) == 3)
    assert (other.requests["b0"].fork_of, other.requests["b1"].fork_of) == ("", "b0")
    await replicas.client.shutdown()


async def test_what_kills_two_replicas_does_not_kill_a_third() -> None:
    replicas = Replicas(READY, READY, READY)
    await replicas.client.wait_until_ready()
    await replicas.add("killer", "good1", "good2")
    replicas.engines[0][0].die()
    await replicas.read_until(lambda: "killer" in replicas.engines[1][0].requests)
    replicas.engines[1][0].die()
    await replicas.read_until(lambda: len(replicas.engines[1]) > 1)
    replicas.engines[1][1].deliver(READY)  # the killer's second engine core is replaced, and searches
    await replicas.read_until(lambda: "killer" in replicas.engines[1][1].requests)
    assert set(replicas.engines[1][1].requests) == {"killer"}
    assert "killer" not in replicas.engines[2][0].requests
    for number in (1, 2):
        await replicas.read_until(lambda: "killer" in replicas.engines[1][number].requests)  # noqa: B023
        replicas.engines[1][number].die()
        await replicas.read_until(lambda: len(replicas.engines[1]) > number + 1)  # noqa: B023
        replicas.engines[1][number + 1].deliver(READY)
    await replicas.read_until(lambda: "killer" in replicas.ends)
    assert replicas.ends == {"killer": QuarantinedError.KILLS_ENGINES}
    await replicas.read_until(lambda: "good1" in replicas.engines[1][3].requests)
    await replicas.client.shutdown()


async def test_the_last_replica_that_is_gone_for_good_is_the_end() -> None:
    replicas = Replicas(READY, READY, max_restarts=0)
    await replicas.client.wait_until_ready()
    await replicas.add("r0", "r1")
    replicas.engines[0][0].die()
    await replicas.read_until(lambda: "r0" in replicas.engines[1][0].requests)
    assert not replicas.client.is_dead
    assert await replicas.client.call(Control.RESET_PREFIX_CACHE)
    replicas.engines[1][0].say("r0", *[5] * 8)  # beyond suspicion: the next death is not one of a search
    await replicas.read_until(lambda: "r0" in replicas.tokens)
    replicas.engines[1][0].die()
    with pytest.raises(EngineDeadError, match="restarted too often"):
        await replicas.read_until(lambda: False)
    assert replicas.client.is_dead
    await replicas.client.shutdown()


async def test_requests_that_no_other_replica_can_take_end_with_one_that_is_gone_for_good() -> None:
    replicas = Replicas(READY, OTHER, max_restarts=0, allow_mixed_numerics=True)
    await replicas.client.wait_until_ready()
    await replicas.add("r0", "r1")
    replicas.engines[0][0].die()
    await replicas.read_until(lambda: bool(replicas.ends))
    assert replicas.ends == {"r0": EngineLostError.TEXT}
    await replicas.client.shutdown()


async def test_requests_of_one_that_is_gone_for_good_wait_for_another_that_is_being_replaced() -> None:
    replicas = Replicas(READY, READY)
    await replicas.client.wait_until_ready()
    for index in (0, 1):
        replicas.engines[index][0].die()
        await replicas.read_until(lambda index=index: len(replicas.engines[index]) > 1)
        if not index:
            await replicas.add("r0", "r1")
    replicas.client.note_end(1, "it has ended")  # both requests were waiting here
    assert not replicas.ends
    replicas.engines[0][1].deliver(READY)
    await replicas.read_until(lambda: {"r0", "r1"} == set(replicas.engines[0][1].requests))
    await replicas.client.shutdown()


async def test_a_replica_that_has_ended_for_good_is_not_waited_for() -> None:
    for is_waiting in (False, True):
        replicas = Replicas(None, READY)
        starting = asyncio.ensure_future(replicas.client.wait_until_ready()) if is_waiting else None
        await asyncio.sleep(0)
        replicas.client.note_end(0, "it has ended")
        async with asyncio.timeout(60):
            await (starting or replicas.client.wait_until_ready())
        assert [ready.engine_index for ready in replicas.client.engines] == [1]
        await replicas.add("r0", "r1")
        assert set(replicas.engines[1][0].requests) == {"r0", "r1"}
        replicas.client.note_end(1, "it has ended, too")
        assert replicas.client.is_dead
        await replicas.client.shutdown()


async def test_replicas_that_have_all_ended_for_good_cannot_start() -> None:
    replicas = Replicas(None, None)
    for index in range(2):
        replicas.client.note_end(index, "it has ended")
    with pytest.raises(EngineStartError, match="all engine cores have ended"):
        await replicas.client.wait_until_ready()


async def test_replicas_of_other_bits_are_refused_with_both_sides() -> None:
    with pytest.raises(EngineStartError, match="engine 0 and engine 1: linear is avx512, but avx2"):
        await Replicas(READY, OTHER).client.wait_until_ready()


async def test_mixed_replicas_serve_but_no_request_goes_on_with_other_bits() -> None:
    replicas = Replicas(READY, OTHER, allow_mixed_numerics=True)
    await replicas.client.wait_until_ready()
    await replicas.add("r0", "r1")
    replicas.engines[1][0].say("r1", 5)
    await replicas.read_until(lambda: "r1" in replicas.tokens)
    replicas.engines[1][0].die()
    await replicas.read_until(lambda: len(replicas.engines[1]) > 1)
    assert replicas.client.num_unmoved_requests == 1
    replicas.engines[1][1].deliver(OTHER)
    await replicas.read_until(lambda: "r1" in replicas.engines[1][1].requests)
    assert replicas.engines[1][1].requests["r1"].output_token_ids == (5,)
    assert "r1" not in replicas.engines[0][0].requests
    await replicas.client.shutdown()


def test_the_contract_id_follows_all_that_bits_depend_on_and_nothing_else() -> None:
    config = ModelRunnerConfig("a", tensor_parallel_size=2)
    backends = {"linear": "avx512", "weights": "0", "decode": "captured"}
    other_values = [
        (replace(config, tensor_parallel_size=1), "float32", "float32", 257, backends),
        (replace(config, quantization="int8"), "float32", "float32", 257, backends),
        (replace(config, logits_processors=("m:C",)), "float32", "float32", 257, backends),
        (config, "bfloat16", "float32", 257, backends),
        (config, "float32", "fp8", 257, backends),
        (config, "float32", "float32", 257, {**backends, "weights": "1"}),
        (config, "float32", "float32", 257, {**backends, "linear": "avx2"}),
    ]
    ids = [numeric_contract_id(*values) for values in other_values]
    own = numeric_contract_id(config, "float32", "float32", 257, backends)
    assert len({own, *ids}) == len(ids) + 1
    same = replace(config, model_path="elsewhere", max_model_len=4096, num_engines=4)
    for entry in ("decode", "caches"):
        assert numeric_contract_id(same, "float32", "float32", 257, {**backends, entry: "other"}) == own
    one = replace(config, tensor_parallel_size=1)
    stages, ranks = replace(one, pipeline_parallel_size=2), {**backends, "ranks": "2 stages"}  # these change no bit
    assert numeric_contract_id(stages, "float32", "float32", 257, ranks) == ids[0]
