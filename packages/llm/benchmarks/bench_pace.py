"""What running streams notice of prompts: times between tokens with and without a limit of a step's time, in turns.

Everything is measured in processor time of one thread, so that other work on the machine counts little. It is the clock
of the engine cores too. Two shapes with random weights in bfloat16, without drafts. A load keeps so many requests in
flight; `long` adds a prompt of 4,000 tokens, and the next one when it has its first token. A decode step is the median
step without a prompt.

    python packages/llm/benchmarks/bench_pace.py [gpt2|llama] [8|32|long] [ROUNDS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50_257,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32_000,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, float]] = {
    "no limit": {}, "8 steps": {"max_itl_steps": 8.0}, "3 steps": {"max_itl_steps": 3.0},
}  # fmt: skip
NUM_LONG_TOKENS = 4000


@dataclass(frozen=True)
class Load:
    """So many requests at once, of so many in all, and the most long prompts that come beside them."""

    num_at_once: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_long_prompts: int = 0


LOADS = {
    "8": Load(8, 24, 128, 64),
    "32": Load(32, 64, 64, 32),
    "long": Load(32, 40, 32, 32, num_long_prompts=3),
}


@dataclass
class Measured:
    """Seconds: between tokens of a stream, until first tokens, of steps without prompts; and tokens per second."""

    gaps: list[float]
    first: list[float]
    decodes: list[float]
    tokens_per_s: float


def make_core(folder: Path, limits: dict[str, float], max_model_len: int) -> EngineCore:
    """An engine core that counts processor time."""
    sizes = {"max_model_len": max_model_len, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    model = ModelRunnerConfig(str(folder), dtype="bfloat16", load_format="dummy", device="cpu", **sizes)
    scheduler = SchedulerConfig(max_prefill_tokens=256, **sizes, **limits)
    core = build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=1024, enable_prefix_caching=False))
    core._events.clock = time.process_time
    return core


def prompts(num_tokens: int, seed: int) -> Iterator[list[int]]:
    """Prompts without end, which share nothing."""
    number = seed
    while True:
        number += 1
        yield [(31 * number + 7 * place * number) % 30_000 for place in range(num_tokens)]


def run(core: EngineCore, load: Load, seed: int) -> Measured:
    """Serves one load."""
    short, long = prompts(load.num_prompt_tokens, seed), prompts(NUM_LONG_TOKENS, seed)
    params = SamplingParams(temperature=0.0, max_tokens=load.num_output_tokens, ignore_eos=True)
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    found = Measured([], [], [], 0.0)
    num_begun = num_ended = num_long = 0
    is_long_waiting = False
    start_s = time.process_time()
    while num_ended < load.num_requests:
        while num_begun < load.num_requests and num_begun - num_ended < load.num_at_once:
            name = f"{seed}-{num_begun}"
            core.add_request(EngineCoreRequest(name, next(short), params))
            arrived[name], num_begun = time.process_time(), num_begun + 1
        if num_long < load.num_long_prompts and not is_long_waiting:
            num_long, is_long_waiting = num_long + 1, True
            core.add_request(EngineCoreRequest(f"long-{seed}-{num_long}", next(long), SamplingParams(max_tokens=1)))
        begun_s = time.process_time()
        outputs = core.step()
        now_s = time.process_time()
        if outputs.scheduler_stats.num_scheduled_tokens == outputs.scheduler_stats.num_scheduled_rows:
            found.decodes.append(now_s - begun_s)
        for output in outputs.outputs:
            if output.request_id.startswith("long"):
                is_long_waiting = False
                continue
            if output.request_id in last:
                found.gaps.append(now_s - last[output.request_id])
            else:
                found.first.append(now_s - arrived[output.request_id])
            last[output.request_id] = now_s
            num_ended += output.finish_reason is not None
    seconds = time.process_time() - start_s
    core.abort_requests([f"long-{seed}-{num_long}"])
    while core.has_unfinished_requests():
        core.step()
    found.tokens_per_s = load.num_requests * (load.num_prompt_tokens + load.num_output_tokens) / seconds
    return found


def main(shapes: list[str], loads: list[str], num_rounds: int = 2) -> None:
    """Prints a line for each shape, load and setting."""
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
            max_model_len = 1024 if shape == "gpt2" else 4200
            cores = {name: make_core(Path(folder), limits, max_model_len) for name, limits in SETTINGS.items()}
            for name in loads:
                if LOADS[name].num_long_prompts and max_model_len < NUM_LONG_TOKENS:
                    continue
                measured: dict[str, list[Measured]] = {setting: [] for setting in cores}
                for number in range(num_rounds + 1):
                    for setting, core in cores.items():
                        load = LOADS[name] if number else Load(4, 8, 64, 16)
                        measured[setting].append(run(core, load, 1000 * number))
                for setting, runs in measured.items():
                    print(shape, name, setting, _line(runs[1:]), flush=True)


def _line(runs: list[Measured]) -> str:
    gaps = [gap for one in runs for gap in one.gaps]
    decode_s = median([step for one in runs for step in one.decodes] or [0.0])
    p99 = quantiles(gaps, n=100)[-1]
    return (
        f"tokens/s {median(one.tokens_per_s for one in runs):.1f}, between tokens p50 {median(gaps) * 1e3:.0f} p99 "
        f"{p99 * 1e3:.0f} max {max(gaps) * 1e3:.0f} ms, decode {decode_s * 1e3:.1f} ms, first token p50 "
        f"{median([one for each in runs for one in each.first]) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1:2] or list(SHAPES), sys.argv[2:3] or list(LOADS), int((sys.argv[3:4] or ["2"])[0]))
