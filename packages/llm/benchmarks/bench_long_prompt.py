"""First tokens of short prompts beside a long one, with and without `--shorter-prompts-first`, in turns.

    python packages/llm/benchmarks/bench_long_prompt.py MODEL [--long 6000 --tokens 48 --budget 384 --rate 0.8]

Engine cores with the defaults of a server run a real model on one thread. Their clock is processor time, and passes
over times without work, so that other work on the machine counts little. Short prompts come evenly, and share nothing.
A row has the median and the p99 of their first tokens by nearest rank, the first token of the long prompt, and the
tokens per second until all have ended. The last rows are medians of the turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from llmstack_engine_core import EngineCore, build_engine_core
from llmstack_llm.engine_args import EngineArgs
from llmstack_types import EngineCoreRequest, SamplingParams

LONG = "long"


class Clock:
    """Processor time, without the times in which there is nothing to do."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def skip_to(self, then_s: float) -> None:
        """Goes on at a later time."""
        self._skipped_s += max(then_s - self(), 0.0)


class Turn(NamedTuple):
    """One load with one setting: seconds, and tokens a second; the long prompt has 0 where there is none."""

    median: float
    p99: float
    long: float
    rate: float


def main() -> None:
    """Prints a row for each load of each turn, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--long", type=int, default=6000, help="tokens of the long prompt (default: 6000)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each short prompt (default: 48)")
    parser.add_argument("--budget", type=int, default=384, help="tokens of a step (default: 384)")
    parser.add_argument("--outputs", type=int, default=8, help="tokens of each answer (default: 8)")
    parser.add_argument("--rate", type=float, default=0.8, help="short prompts a second (default: 0.8)")
    parser.add_argument("--num-short", type=int, default=30, help="how many of them (default: 30)")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    clock, found = Clock(), dict[tuple[bool, bool], list[Turn]]()
    cores = {is_on: make_core(options, clock, is_on=is_on) for is_on in (False, True)}
    for core in cores.values():
        list(run(core, clock, [(0.0, request("warm", 64, 8, random.Random(0)))]))
    for number in range(options.turns):
        for has_long in (False, True):
            for is_on, core in cores.items():
                turn = measure(core, clock, options, seed=number, has_long=has_long)
                found.setdefault((is_on, has_long), []).append(turn)
                print_row(is_on, has_long, turn)
    print("medians:")
    for (is_on, has_long), turns in found.items():
        print_row(is_on, has_long, Turn(*map(statistics.median, zip(*turns, strict=True))))


def make_core(options: argparse.Namespace, clock: Clock, *, is_on: bool) -> EngineCore:
    """An engine core with the defaults of a server on a CPU, whose clock is `clock`."""
    arguments = EngineArgs(
        model=options.model, device="cpu", max_model_len=options.long + 64, max_num_batched_tokens=options.budget,
        num_kv_blocks=(options.long + 64 * options.num_short) // 16 + 64, shorter_prompts_first=is_on,
    )  # fmt: skip
    core = build_engine_core(arguments.create_engine_config()[1])
    core._events.clock = clock
    return core


def request(name: str, num_tokens: int, num_outputs: int, pick: random.Random) -> EngineCoreRequest:
    """A request for so many tokens behind a prompt of random ones."""
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, seed=0)
    return EngineCoreRequest(name, pick.choices(range(3, 500), k=num_tokens), params)


def measure(core: EngineCore, clock: Clock, options: argparse.Namespace, *, seed: int, has_long: bool) -> Turn:
    """Serves one load; the prompts of two loads share nothing, so that nothing is found in the cache."""
    pick = random.Random(f"{seed} {has_long}")
    arrivals = [
        (number / options.rate, request(f"short-{number}", options.tokens, options.outputs, pick))
        for number in range(options.num_short)
    ]
    if has_long:
        arrivals.append((2.5 / options.rate, request(LONG, options.long, options.outputs, pick)))
    began_s = clock()
    firsts = dict(run(core, clock, arrivals))
    seconds = clock() - began_s
    num_tokens = sum(len(one.prompt_token_ids) + options.outputs for _, one in arrivals)
    long = firsts.pop(LONG, 0.0)
    ordered = sorted(firsts.values())
    p99 = ordered[-(-len(ordered) * 99 // 100) - 1]
    return Turn(statistics.median(ordered), p99, long, num_tokens / seconds)


def run(core: EngineCore, clock: Clock, arrivals: list[tuple[float, EngineCoreRequest]]) -> Iterator[tuple[str, float]]:
    """Serves requests that come at these seconds; the name and the first token of each."""
    began_s, waiting = clock(), sorted(arrivals, key=lambda arrival: -arrival[0])
    came = {one.request_id: began_s + after_s for after_s, one in arrivals}
    seen = set[str]()
    while waiting or core.has_unfinished_requests():
        if not core.has_unfinished_requests():
            clock.skip_to(began_s + waiting[-1][0])
        while waiting and began_s + waiting[-1][0] <= clock():
            core.add_request(waiting.pop()[1])
        for output in core.step().outputs:
            if output.new_token_ids and output.request_id not in seen:
                seen.add(output.request_id)
                yield output.request_id, clock() - came[output.request_id]


def print_row(is_on: bool, has_long: bool, turn: Turn) -> None:
    """Prints one load."""
    setting = "shorter first" if is_on else "by rank"
    beside, long = ("beside", f"{turn.long:6.2f} s") if has_long else ("alone ", "        ")
    print(f"{setting:<14} {beside} p50 {turn.median:.3f} p99 {turn.p99:.3f} s, the long one {long}, "
          f"{turn.rate:.1f} tokens/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
