"""Several replicas are exchanged together while requests run; none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from engine_client_helpers.scripted import OTHER, READY, Engine, SpokenTo

from llmstack_engine_client import RecoveringClient, ReloadingClient
from llmstack_engine_client.replicas.exchangeable import ReplicasClient
from llmstack_engine_core import EngineConfig
from llmstack_types import Control, EngineReady, EngineStartError, ModelRunnerConfig

CONFIG = EngineConfig(ModelRunnerConfig("echo", num_engines=2), runner="echo")


class Server(SpokenTo):
    """A client whose engine cores are the test; `generations` are those of each reload."""

    def __init__(self) -> None:
        super().__init__()
        self.generations: list[list[Engine]] = []
        self.readies: list[EngineReady | None] = [READY, READY]
        self.client = ReloadingClient(CONFIG, self.start)

    def start(self, config: EngineConfig, addresses: Sequence[str]) -> ReplicasClient:
        engines: list[Engine] = []
        self.generations.append(engines)

        def starter(ready: EngineReady | None) -> Callable[[], Engine]:
            def start() -> Engine:
                engines.append(Engine(ready))
                return engines[-1]

            return start

        return ReplicasClient([RecoveringClient(starter(ready), max_restarts=3) for ready in self.readies])


async def test_each_replica_finishes_its_requests_and_the_next_ones_get_the_new_ones() -> None:
    server = Server()
    await server.client.wait_until_ready()
    await server.add("r0", "r1")
    old = server.generations[0]
    await server.client.prepare(CONFIG, list)
    await server.add("r2")
    server.client.switch()
    assert server.client.num_finishing == 3
    await server.add("r3", "r4")
    assert [sorted(engine.requests) for engine in server.generations[1]] == [["r3"], ["r4"]]
    await server.add("fork", fork_of="r1")
    assert "fork" in old[1].requests
    assert await server.client.call(Control.RESET_PREFIX_CACHE, engine_index=1)
    assert [len(engine.sent) - len(engine.requests) for engine in server.generations[1]] == [
        1,
        2,
    ]  # the cache, the call
    # A crash of an old replica moves its request to the other old one, which has the same weights.
    old[0].die()
    await server.read_until(lambda: {"r0", "r2"} & old[1].requests.keys())
    for request_id in ("r0", "r1", "r2", "fork"):
        old[1].say(request_id, 5, is_end=True)
    await server.read_until(lambda: len(server.ends) == 4)
    assert set(server.ends.values()) == {None}
    await server.read_until(lambda: not server.client.is_reloading)
    assert server.client.num_requests == 2
    await server.client.shutdown()


async def test_requests_of_all_replicas_move_and_a_beam_search_stays_together() -> None:
    server = Server()
    await server.client.wait_until_ready()
    await server.add("r0", "r1")
    await server.add("b0", n=2, use_beam_search=True, temperature=0.0)
    await server.add("b1", n=2, use_beam_search=True, temperature=0.0, fork_of="b0")
    for index, engine in enumerate(server.generations[0]):
        engine.say(f"r{index}", 5, 6)
    await server.read_until(lambda: len(server.tokens) == 2)
    await server.client.prepare(CONFIG, list)
    assert server.client.switch(moves=True) == 4
    new = server.generations[1]
    await server.read_until(lambda: sum(len(engine.requests) for engine in new) == 4)
    requests = new[0].requests | new[1].requests
    assert [requests[name].output_token_ids for name in ("r0", "r1")] == [(5, 6), (5, 6)]
    assert any({"b0", "b1"} <= engine.requests.keys() for engine in new)
    await server.read_until(lambda: not server.client.is_reloading)
    assert server.client.num_requests == 4
    await server.client.shutdown()


async def test_replicas_that_compute_other_bits_get_no_running_request() -> None:
    server = Server()
    await server.client.wait_until_ready()
    await server.add("r0", "r1")
    server.readies = [READY, OTHER]
    with pytest.raises(EngineStartError, match="engine 0 and engine 1"):
        await server.client.prepare(CONFIG, list)
    server.readies = [OTHER, OTHER]
    await server.client.prepare(CONFIG, list)
    with pytest.raises(EngineStartError, match="numeric contract"):
        server.client.switch(moves=True)
    await server.client.drop()
    server.generations[0][0].say("r0", 5, is_end=True)
    await server.read_until(lambda: "r0" in server.ends)
    assert server.client.num_requests == 1
    assert not server.client.is_reloading
    await server.client.shutdown()
