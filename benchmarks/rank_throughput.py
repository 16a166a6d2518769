"""The throughput of two ranks beside one process, and the ratios that the project aims at.

python benchmarks/rank_throughput.py
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]  # it ships no types
import torch

from llmstack_llm import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 4, "vocab_size": 8192,
    "max_position_embeddings": 512, "eos_token_id": 0,
}  # fmt: skip
NUM_REQUESTS = 64
NUM_REPEATS = 3
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "enable_prefix_caching": False, "skip_tokenizer_init": True,
    "max_num_batched_tokens": 512,
}  # fmt: skip
PROMPTS = ((64, 32), (16, 448), (64, 448))


class Rates(NamedTuple):
    """Tokens per second of 64 requests: of their prompts, and of their decodes; the medians."""

    prefill: float
    decode: float


def measure_throughput(**sizes: int) -> Rates:
    """Two stages share the running requests, so each of their micro-batches has 32 rows."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        options: dict[str, Any] = {**OPTIONS, **sizes}
        with LLM(folder, **options) as llm:

            def run(num_prompt_tokens: int, num_tokens: int) -> float:
                return generate(llm, NUM_REQUESTS, num_prompt_tokens, num_tokens)

            run(4, 4)
            prefills = [NUM_REQUESTS * 32 / run(32, 1) for _ in range(NUM_REPEATS)]
            return Rates(statistics.median(prefills), statistics.median(_decodes(run)))


def generate(llm: LLM, num_requests: int, num_prompt_tokens: int, num_tokens: int = 1) -> float:
    """Seconds for some requests of one length."""
    prompts = [{"prompt_token_ids": [1 + index] * num_prompt_tokens} for index in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def processor_times() -> list[float]:
    """Seconds of processor time of this process, and of each rank that it has started."""
    this = psutil.Process()
    ranks = [child for child in this.children(recursive=True) if "llmstack_parallel.rank" in child.cmdline()]
    return [sum(process.cpu_times()[:2]) for process in (this, *ranks)]


def compare_stages() -> None:
    """The prefill of two stages and of one process, in turns, by processor time: it counts on a busy machine, too.

    Two stages on free processors need the time of the slower one, and one step more. One process of two threads needs
    half of its processor time at best.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        with LLM(folder, **OPTIONS) as alone, LLM(folder, **OPTIONS, pipeline_parallel_size=2) as staged:

            def spent(llm: LLM, num_requests: int, num_prompt_tokens: int) -> list[float]:
                before = processor_times()
                generate(llm, num_requests, num_prompt_tokens)
                return [after - start for after, start in zip(processor_times(), before, strict=True)]

            for llm in (alone, staged):
                spent(llm, 4, 4)
            for shape in PROMPTS:
                turns = [(spent(alone, *shape)[0], spent(staged, *shape)) for _ in range(NUM_REPEATS)]
                half = statistics.median(one for one, _ in turns) / 2
                slower = max(statistics.median(two[stage] for _, two in turns) for stage in (0, 1))
                num_steps = max(16, shape[0] * shape[1] // OPTIONS["max_num_batched_tokens"])
                print(
                    f"{shape[0]} prompts of {shape[1]} tokens: half of one process {half:.2f} s, a stage {slower:.2f} s"
                )
                say("PP 2 to one process: prefill, by processor time", half / slower / (1 + 1 / num_steps), 0.95)


def _decodes(run: Any) -> list[float]:
    """The time of the prompts is taken off."""
    return [NUM_REQUESTS * 15 / (run(2, 16) - run(2, 1)) for _ in range(NUM_REPEATS)]


def say(what: str, value: float, aim: float, unit: str = "", *, is_most: bool = False) -> None:
    """One line of the result."""
    is_met = value <= aim if is_most else value >= aim
    bound = "at most" if is_most else "at least"
    print(f"{what}: {value:.2f}{unit}, aim {bound} {aim:g}{unit}: {'met' if is_met else 'missed'}", flush=True)


def main() -> None:
    """Measures everything, and says which aims are met."""
    torch.set_num_threads(2)
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
    rates = {}
    for name, sizes in {
        "one process": {},
        "PP 2": {"pipeline_parallel_size": 2},
        "TP 2": {"tensor_parallel_size": 2},
    }.items():
        rates[name] = measured = measure_throughput(**sizes)
        print(f"{name}: {measured.prefill:.0f} prompt tokens/s, {measured.decode:.0f} decoded tokens/s", flush=True)
    alone, stages, shards = rates.values()
    say("PP 2, 32 rows per micro-batch, to one process of 64 rows: decode", stages.decode / alone.decode, 0.9)
    say("PP 2 to one process: prefill", stages.prefill / alone.prefill, 0.95)
    say("TP 2 to one process: decode", shards.decode / alone.decode, 0.9)
    say("TP 2 to one process: prefill", shards.prefill / alone.prefill, 0.9)
    compare_stages()
    torch.set_num_threads(1)
    ranks = runpy.run_path(str(ROOT / "packages/parallel/benchmarks/bench_ranks.py"))
    say("control of a step at two ranks", ranks["measure_control"](), 150.0, " us", is_most=True)
    ours, spinning = ranks["measure_sum"]()
    print(f"sum of 32 x 4096 float32 at two ranks: {ours:.0f} us, a loop that copies and spins {spinning:.0f} us")
    say("sum of 32 x 4096 to that loop", ours / spinning, 1.5, is_most=True)


if __name__ == "__main__":
    main()
