"""The two front ends over one engine core of this process: `LLM`, and `AsyncLLM` on an event loop, in turns.

The demo model, greedy, whole answers alone. Each turn is a process of its own with fresh prompts. Speed is counted in
tokens per second of processor time, so that other work on the machine counts little.

    python packages/llm/benchmarks/bench_front_ends.py [TURNS]
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from llmstack_demo_model import model_path
from llmstack_llm import LLM, AsyncLLM, EngineArgs, RequestOutput
from llmstack_types import RequestOutputKind, SamplingParams

NUM_REQUESTS, NUM_TOKENS, NUM_KV_BLOCKS = 256, 64, 4000
SAMPLING = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
WORDS = ["a", "bird", "blue", "boat", "cat", "dog", "ran", "red", "river", "small", "song", "the", "tree", "under"]


def prompts_of(seed: int) -> list[str]:
    """Prompts that no other turn has."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=20)) for _ in range(NUM_REQUESTS)]


def synchronous(prompts: Sequence[str]) -> float:
    """Seconds of processor time by `LLM.generate`."""
    with LLM(str(model_path()), num_kv_blocks=NUM_KV_BLOCKS) as llm:
        llm.generate(prompts[:8], SAMPLING, use_tqdm=False)
        began_s = time.process_time()
        llm.generate(prompts, SAMPLING, use_tqdm=False)
        return time.process_time() - began_s


async def asynchronous(prompts: Sequence[str]) -> float:
    """Seconds of processor time by a task of each request."""
    arguments = EngineArgs(model=str(model_path()), num_kv_blocks=NUM_KV_BLOCKS)
    engine = AsyncLLM.from_engine_args(arguments, multiprocess=False)

    async def answer(index: int) -> list[RequestOutput]:
        return [output async for output in engine.generate(prompts[index], SAMPLING, str(index))]

    await engine.wait_until_ready()
    await asyncio.gather(*map(answer, range(8)))
    began_s = time.process_time()
    await asyncio.gather(*map(answer, range(NUM_REQUESTS)))
    taken_s = time.process_time() - began_s
    await engine.shutdown()
    return taken_s


def main() -> None:
    """Prints the speeds of each turn, and the median ratio."""
    if len(sys.argv) == 3:
        prompts = prompts_of(int(sys.argv[2]))
        print(synchronous(prompts) if sys.argv[1] == "LLM" else asyncio.run(asynchronous(prompts)))
        return
    ratios = []
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 9):
        seed = str(random.randrange(1 << 30))
        seconds = {
            name: float(subprocess.check_output([sys.executable, __file__, name, seed]).split()[-1])
            for name in ("LLM", "AsyncLLM")
        }
        speeds = {name: NUM_REQUESTS * NUM_TOKENS / taken_s for name, taken_s in seconds.items()}
        ratios.append(speeds["AsyncLLM"] / speeds["LLM"])
        figures = [f"{name} {speed:,.0f} tok/s" for name, speed in speeds.items()]
        print(*figures, f"{ratios[-1]:.2f}", sep=", ", flush=True)
    print(f"AsyncLLM over LLM, median of {len(ratios)}: {median(ratios):.2f}")


if __name__ == "__main__":
    main()
