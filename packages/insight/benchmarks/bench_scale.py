"""Where routing saturates as machines are added: on paper, from measured unit costs, and in simulations.

    python packages/insight/benchmarks/bench_scale.py                    # both, for 64, 250 and 1000 machines
    python packages/insight/benchmarks/bench_scale.py --machines 1000 --skip-simulation

Each machine is one replica. The costs are processor time of one API process, so they hold on a machine with other work.
The paper multiplies them by rates: those at which the engine core sends (`STATS_INTERVAL_S`, `CACHE_UPDATE_INTERVAL_S`)
and a heartbeat's. The simulation sends conversations to as many schedulers and caches by the router of the server.
"""

from __future__ import annotations

import argparse
import inspect
import random
import time
from collections.abc import Callable, Sequence

import zmq

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_client.routing import Router, RoutingPolicy
from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.engine_loop import CACHE_UPDATE_INTERVAL_S, STATS_INTERVAL_S
from llmstack_engine_core.ipc.sockets import set_heartbeats
from llmstack_engine_core.messages.protocol import ENGINE_MESSAGES, CacheUpdate
from llmstack_insight.simulate import SimulationConfig, TraceRequest, simulate
from llmstack_insight.simulate.simulation import hits_of_one_cache
from llmstack_kv_cache import KVCacheManager, segment_keys
from llmstack_kv_cache.segments import pack_keys
from llmstack_types import EngineCoreOutputs

BLOCK_SIZE = 16
NUM_BLOCKS = 8192  # of each simulated machine: 131,072 tokens
NUM_PROMPT_TOKENS = 4000
SEGMENTS_PER_UPDATE = 16
PIECE = 512  # tokens that a trace names by one number
HEARTBEAT_TIMEOUT_S = inspect.signature(HostsConfig).parameters["heartbeat_timeout_s"].default


def cpu_us(function: Callable[[], object], num_calls: int) -> float:
    """Processor time of a call, the median of seven rounds."""
    rounds = []
    for _ in range(7):
        began_s = time.thread_time()
        for _ in range(num_calls):
            function()
        rounds.append((time.thread_time() - began_s) / num_calls * 1e6)
    return sorted(rounds)[3]


def choice_us(num_machines: int) -> float:
    """A choice for a prompt of which each machine has some part cached."""
    pick = random.Random(1)
    prompt = [pick.randrange(30_000) for _ in range(NUM_PROMPT_TOKENS)]
    router, keys = Router(num_machines, RoutingPolicy.EXACT), segment_keys(prompt, BLOCK_SIZE)
    router.set_block_size(BLOCK_SIZE)
    for machine in range(num_machines):
        router.apply(machine, CacheUpdate(0, True, pack_keys(keys[: pick.randrange(len(keys))])))

    def choose() -> None:
        router.route("r", prompt, "", [0] * num_machines)
        router.end("r")

    return cpu_us(choose, 20)


def update_us(num_machines: int) -> float:
    """One report of changes of a cache, decoded and applied."""
    pick, router = random.Random(2), Router(num_machines, RoutingPolicy.EXACT)
    router.set_block_size(BLOCK_SIZE)
    router.apply(num_machines - 1, CacheUpdate(0, True))
    frames = []
    for number in range(1, 7 * 200 + 1):
        keys = pack_keys([pick.getrandbits(64) for _ in range(SEGMENTS_PER_UPDATE)])
        frames.append(ENGINE_MESSAGES.encode(CacheUpdate(number, False, keys)))
    left = iter(frames)
    return cpu_us(lambda: router.apply(num_machines - 1, ENGINE_MESSAGES.decode(next(left))[1]), 200)  # type: ignore[arg-type]


def stats_us() -> float:
    """The state of a machine, decoded."""
    stats = Scheduler(SchedulerConfig(), KVCacheManager(100)).stats()
    frame = ENGINE_MESSAGES.encode(EngineCoreOutputs([], 1.0, stats))
    return cpu_us(lambda: ENGINE_MESSAGES.decode(frame), 500)


def heartbeats_share(num_machines: int, seconds: float = 6.0) -> float:
    """The share of a core that the heartbeats of so many connections take, both ends; half of it is one end."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_machines + 8)
    first = context.socket(zmq.ROUTER)
    set_heartbeats(first, HEARTBEAT_TIMEOUT_S)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    others = []
    try:
        for _ in range(num_machines):
            others.append(context.socket(zmq.DEALER))
            set_heartbeats(others[-1], HEARTBEAT_TIMEOUT_S)
            others[-1].connect(f"tcp://127.0.0.1:{port}")
            others[-1].send(b"")
        for _ in range(num_machines):
            first.recv_multipart()
        began_s = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - began_s) / seconds
    finally:
        context.destroy(linger=0)


def on_paper(machines: Sequence[int]) -> None:
    """Prints the unit costs, and the machines with which each takes the whole of one API process."""
    stats, update = stats_us(), 0.0
    print("| machines | choice | update applied | updates | states | heartbeats | requests/s with what is left |")
    print("|---|---|---|---|---|---|---|")
    for number in machines:
        choice, update, heartbeats = choice_us(number), update_us(number), heartbeats_share(number) / 2
        updates = number * update / 1e6 / CACHE_UPDATE_INTERVAL_S
        states = number * stats / 1e6 / STATS_INTERVAL_S
        left = max(1.0 - updates - states - heartbeats, 0.0)
        print(
            f"| {number} | {choice / 1000:.2f} ms | {update:.1f} µs | {updates:.0%} | {states:.0%} | {heartbeats:.1%} "
            f"| {left / choice * 1e6:.0f} |"
        )
    most_updates, most_states = CACHE_UPDATE_INTERVAL_S / update * 1e6, STATS_INTERVAL_S / stats * 1e6
    print(
        f"A state takes {stats:.0f} µs and comes each {STATS_INTERVAL_S * 1000:.0f} ms. An update of a busy one comes"
    )
    print(f"each {CACHE_UPDATE_INTERVAL_S * 1000:.0f} ms. Updates alone take a core at {most_updates:.0f} machines,")
    print(f"and states at {most_states:.0f}.")


def conversations(num_machines: int, per_machine: int, num_turns: int) -> list[TraceRequest]:
    """Conversations that begin with one of 50 system prompts of 1,024 tokens; each turn adds some 1,500 tokens.

    As many come per machine and second, whatever the number of machines.
    """
    pick, own, trace = random.Random(3), 1000, []
    duration_s = 10.0 * num_turns
    for _ in range(num_machines * per_machine):
        pieces = [2 * pick.randrange(50) + part for part in (0, 1)]
        arrival_s = pick.uniform(0, duration_s / 2)
        for _ in range(num_turns):
            num_new = pick.randint(1, 5)
            pieces += range(own, own + num_new)
            own += num_new
            trace.append(TraceRequest(arrival_s, len(pieces) * PIECE, 16, tuple(pieces)))
            arrival_s += pick.uniform(5.0, 15.0)
    return sorted(trace, key=lambda request: request.arrival_s)


def by_simulation(machines: Sequence[int], per_machine: int, num_turns: int) -> None:
    """Prints what exact routing finds and how evenly it spreads, beside taking turns."""
    print(
        "| machines | requests | exact: share of possible hits | busiest / mean | TTFT p50 | p99 | turns: share | p99 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for number in machines:
        trace = conversations(number, per_machine, num_turns)
        possible = hits_of_one_cache(trace, NUM_BLOCKS * number, BLOCK_SIZE)
        reports = []
        for routing in (RoutingPolicy.EXACT, RoutingPolicy.ROUND_ROBIN):
            config = SimulationConfig(num_blocks=NUM_BLOCKS, num_replicas=number, routing=routing)
            reports.append(simulate(trace, config))
        exact, turns = reports
        first = sorted(exact.ttft_s)
        print(
            f"| {number} | {len(trace):,} | {exact.num_hit_tokens / possible:.1%} | {exact.imbalance:.2f} "
            f"| {first[len(first) // 2]:.2f} s | {first[len(first) * 99 // 100]:.2f} s "
            f"| {turns.num_hit_tokens / possible:.1%} | {sorted(turns.ttft_s)[len(first) * 99 // 100]:.2f} s |",
            flush=True,
        )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[64, 250, 1000])
    parser.add_argument("--conversations", type=int, default=3, help="per machine (default: 3)")
    parser.add_argument("--turns", type=int, default=4, help="requests of a conversation (default: 4)")
    parser.add_argument("--skip-simulation", action="store_true")
    parser.add_argument("--skip-paper", action="store_true")
    arguments = parser.parse_args()
    if not arguments.skip_paper:
        on_paper(arguments.machines)
    if not arguments.skip_simulation:
        by_simulation(arguments.machines, arguments.conversations, arguments.turns)


if __name__ == "__main__":
    main()
