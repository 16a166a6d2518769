"""What drafts cost: the time of a step with k drafts in each of b rows, over that of a step among others without.

A step without drafts is shorter after others than after a step with drafts, since it is prepared from the one before.
What the next step takes more therefore counts as a cost of the drafts.

Processor time of the one thread that computes, of steps in turns, in bfloat16. The models are GPT-2's shape with random
weights, and the demo model with `--small`: beside its step of 0.2 ms, what a step with drafts takes whatever the model
is most of their cost. The drafts are wrong nearly always, so every step has the same work. What other programs do can
only add to a step's time, by what they take of caches and memory. So the first quartile of many turns counts, and
`doubt` is how far a ratio of medians is from that of quartiles. Rows with a doubt of more than 0.05 are to be measured
again, on a quieter machine.

Run it for each native variant and both models, and put what it prints into `draft_costs.py` of the scheduler: decisions
about drafts read these tables in place of a clock. `--gguf` measures weights of few bits.

    python packages/llm/benchmarks/measure_draft_costs.py
    python packages/llm/benchmarks/measure_draft_costs.py --small
    python packages/llm/benchmarks/measure_draft_costs.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import torch

from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_demo_model import model_path
from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_gguf.folder import model_folder
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50_257,
}  # fmt: skip
LIMITS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
NUM_TOKEN_IDS = 3000  # of both models
NUMS_ROWS = (1, 2, 4, 8, 16)
NUMS_DRAFTS = (0, 1, 2, 3, 4, 6, 8)
NUM_WARM_UPS = 2  # the first of a size may be captured
NUM_TURNS = 10  # of a round; a turn adds five tokens per number of drafts to each row


class WrongDrafts:
    """Proposes so many drafts; those of a random model are wrong nearly always."""

    def __init__(self) -> None:
        self.num_drafts = 0

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """Tokens that depend on the place."""
        return [(len(token_ids) * 97 + place) % NUM_TOKEN_IDS for place in range(min(self.num_drafts, max_num_tokens))]

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """There is nothing to learn."""

    def forget(self, request_id: str) -> None:
        """There is nothing to forget."""


def make_core(drafts: WrongDrafts, *, is_small: bool, gguf: Path | None) -> EngineCore:
    """An engine core whose drafts are those."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(GPT2))
        folder, load_format = (str(model_path()), "auto") if is_small else (made, "dummy")
        if gguf is not None:
            folder, load_format = str(model_folder(gguf)), "gguf"
        dtype = "bfloat16" if gguf is None else "auto"
        model = ModelRunnerConfig(
            folder, dtype=dtype, load_format=load_format, device="cpu", max_num_drafts=max(NUMS_DRAFTS), **LIMITS
        )
        scheduler = SchedulerConfig(speculative=SpeculativeConfig("ngram", max(NUMS_DRAFTS)), **LIMITS)
        core = build_engine_core(
            EngineConfig(model, scheduler=scheduler, num_blocks=512, enable_prefix_caching=False, snapshot_steps=0)
        )
    inner = core._scheduler  # within the one that writes the log of steps
    inner = getattr(inner, "_scheduler", inner)
    inner._drafting._source = drafts
    return core


def measure(core: EngineCore, drafts: WrongDrafts, num_rows: int, num_rounds: int) -> list[tuple[float, float]]:
    """First quartile and median of the seconds that a step adds, for each number of drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=446, ignore_eos=True)
    names = [f"{num_rows}-{number}" for number in range(num_rows)]
    without: list[float] = []
    found: list[list[float]] = [[] for _ in NUMS_DRAFTS]
    for _ in range(num_rounds):
        for number, name in enumerate(names):
            prompt = [(31 * number + place) % NUM_TOKEN_IDS for place in range(64)]
            core.add_request(EngineCoreRequest(name, prompt, params))
        for turn in range(NUM_WARM_UPS + NUM_TURNS):
            for times, num_drafts in zip(found, NUMS_DRAFTS, strict=True):
                *_, before, own, after = [timed_step(core, drafts, one) for one in (0, 0, 0, num_drafts, 0)]
                if turn >= NUM_WARM_UPS:
                    without.append(before)
                    times.append(own + after)
        core.abort_requests(names)
        while core.has_unfinished_requests():
            core.step()
    least, middle, _ = quantiles(without)
    return [(least, middle), *((one[0] - least, one[1] - middle) for one in map(quantiles, found[1:]))]


def timed_step(core: EngineCore, drafts: WrongDrafts, num_drafts: int) -> float:
    """Processor seconds of a step with so many drafts in each row."""
    drafts.num_drafts = num_drafts
    start_s = time.thread_time()
    core.step()
    return time.thread_time() - start_s


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of 10 steps of each kind (default: 4)")
    parser.add_argument("--small", action="store_true", help="the demo model in place of GPT-2's shape")
    parser.add_argument("--gguf", type=Path, help="a file in place of GPT-2's shape")
    options = parser.parse_args()
    torch.set_num_threads(1)  # else a part of the work would be another thread's time
    drafts = WrongDrafts()
    core = make_core(drafts, is_small=options.small, gguf=options.gguf)
    print("rows: times of", ", ".join(f"{number} drafts" for number in NUMS_DRAFTS))
    for num_rows in NUMS_ROWS:
        seconds = measure(core, drafts, num_rows, options.rounds)
        least, middle = seconds[0]
        ratios = [one / least for one, _ in seconds]
        doubt = max(abs(one / middle / ratio - 1.0) for (_, one), ratio in zip(seconds, ratios, strict=True))
        print(f"    {num_rows}: ({', '.join(f'{ratio:.2f}' for ratio in ratios)}),", flush=True)
        print(f"      # {1e3 * least:.1f} ms without, doubt {doubt:.2f}", flush=True)


if __name__ == "__main__":
    main()
