"""Many requests at once through scheduler, KV-cache manager, engine core and runner, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmstack_types import EngineCoreRequest, EngineReady, SamplingParams
from report.bench import Bench
from report.engine.models import BLOCK_SIZE, Started, fitting, started
from report.floors import LLAMA_1B, LLAMA_8B, ModelShape, requests_s
from report.rows import Row

if TYPE_CHECKING:
    from llmstack_engine_core.engine_core import EngineCore


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length, all there at the start."""

    num_requests: int
    num_in: int
    num_out: int

    @property
    def name(self) -> str:
        """As rows say it."""
        return f"{self.num_requests} x {self.num_in}/{self.num_out}"


LOAD = Load(256, 1024, 1024)


def run_8b(bench: Bench) -> None:
    """The aim of the whole engine."""
    measure(bench, LLAMA_8B, LOAD)


def run_1b(bench: Bench) -> None:
    """The same where a step leaves the host little time."""
    measure(bench, LLAMA_1B, LOAD)


def measure(bench: Bench, shape: ModelShape, load: Load) -> Row | None:
    """Output tokens per second, first prompt token to last output token."""
    title = f"{shape.name} requests, {load.name}"
    return bench.attempt(title, "tok/s", lambda: _measure(bench, shape, load, title))


def _measure(bench: Bench, shape: ModelShape, load: Load, title: str) -> Row:
    load, tiny = bench.pick(load, Load(3, 12, 4)), fitting(bench, shape)
    with engine_core(bench, tiny, load) as core:
        serve(bench, core, Load(min(8, load.num_requests), load.num_in, min(16, load.num_out)), "warm")
        seconds, _ = serve(bench, core, load, "request")
    num_tokens = load.num_requests * load.num_out
    ceilings = bench.floor_ceilings()
    sizes = (load.num_requests, load.num_in, load.num_out)
    bound = None if ceilings is None else num_tokens / requests_s(tiny, *sizes, ceilings)
    return Row(title, "tok/s", num_tokens / seconds, bound, note=f"{seconds:.1f} s, engine core in process")


@contextmanager
def engine_core(bench: Bench, shape: ModelShape, load: Load) -> Iterator[EngineCore]:
    """An engine core with room for the whole load, scheduling ahead."""
    length = load.num_in + load.num_out
    room = load.num_requests * (length + 2 * BLOCK_SIZE)
    max_model_len = min(shape.max_model_len, length + BLOCK_SIZE)
    with started(bench, shape, room, max_model_len=max_model_len, max_num_seqs=load.num_requests) as runner:
        yield core_over(bench, runner, max_model_len, load.num_requests)


def core_over(
    bench: Bench, runner: Started, max_model_len: int, max_num_seqs: int, *, is_ahead: bool = True
) -> EngineCore:
    """The control plane as the engine core builds it, without prefix caching: prompts are not shared."""
    from llmstack_core_scheduler import SchedulerConfig
    from llmstack_engine_core.build import make_stages
    from llmstack_engine_core.engine_core import EngineCore
    from llmstack_engine_core.events import EventBus
    from llmstack_engine_core.observers import Observers
    from llmstack_engine_core.structured_output import LazyBackend
    from llmstack_step_log.control_plane import CacheConfig, build_scheduler

    spec = runner.runner.kv_cache_spec()
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=bench.pick(8192, 64), max_model_len=max_model_len
    )
    cache = CacheConfig(runner.num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    ready = EngineReady(runner.num_blocks, BLOCK_SIZE, max_model_len, spec.vocab_size, spec.dtype, spec.device)
    scheduler = build_scheduler(limits, cache)
    events = EventBus((), time.monotonic)
    stages = make_stages(scheduler, runner.runner, events, LazyBackend("", None, spec.vocab_size))
    observers = Observers(events, log_stats=False)
    return EngineCore(scheduler, runner.runner, ready, stages, observers, num_steps_under_way=1 + is_ahead)


def serve(
    bench: Bench, core: EngineCore, load: Load, prefix: str, *, is_varied: bool = False
) -> tuple[float, dict[str, list[int]]]:
    """Seconds until all requests are done, and their tokens; varied ones have many lengths, and half are drawn.

    Raises:
        ArithmeticError: Tokens are missing.
    """
    bench.synchronize()
    start_s = time.perf_counter()
    outputs: dict[str, list[int]] = {f"{prefix}-{index}": [] for index in range(load.num_requests)}
    for index, name in enumerate(outputs):
        num_in, temperature = (load.num_in // (1 + index % 4), float(index % 2)) if is_varied else (load.num_in, 0.0)
        core.add_request(_request(name, index, num_in, load.num_out, temperature))
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            outputs[output.request_id].extend(output.new_token_ids)
    seconds = time.perf_counter() - start_s
    num_tokens = sum(map(len, outputs.values()))
    if num_tokens != load.num_requests * load.num_out:
        raise ArithmeticError(f"{num_tokens} tokens came out instead of {load.num_requests * load.num_out}")
    return seconds, outputs


def _request(name: str, index: int, num_in: int, num_out: int, temperature: float) -> EngineCoreRequest:
    prompt = [(7 * place + 13 * index) % 251 for place in range(num_in)]
    params = SamplingParams(temperature=temperature, max_tokens=num_out, ignore_eos=True, seed=index)
    return EngineCoreRequest(name, prompt, params)
