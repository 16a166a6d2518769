"""What drafts by prompt lookup gain with a trained model in a GGUF file, on texts that repeat and on others.

    python packages/llm/benchmarks/measure_draft_gains.py SmolLM2-135M-Instruct.Q4_1.gguf

One request at a time in one thread, with drafts as they are by default on a CPU and without, in turns. The ratio is of
the processor time of a token, medians. The tokens must be the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_gguf.folder import model_folder
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512}
NUM_TOKENS = 96
STORY = "Once upon a time there was a little girl who lived with her grandmother in a house at the edge of the wood. "
CODE = """def add(left, right):
    return left + right

def subtract(left, right):
    return left - right

def multiply(left, right):
    return left * right

"""
COPIED = """Repeat this text word for word, twice:

The old lighthouse stood on the cliff above the harbour. Every evening the keeper climbed ninety steps, lit the lamp,
and wrote the weather into his book. Ships from the north saw the light first."""
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sentence that repeats": (STORY * 4, {"temperature": 0.0}),
    "text to copy": (CHAT.format(COPIED), {"temperature": 0.0}),
    "code": (CODE * 2, {"temperature": 0.0}),
    "story": (CHAT.format("Write a story about a fox and a clockmaker."), {"temperature": 0.8, "seed": 1}),
    "explanation": (CHAT.format("Why is the sky blue? Explain it to a child."), {"temperature": 0.7, "seed": 2}),
}


def make_core(folder: Path, speculative: SpeculativeConfig | None) -> EngineCore:
    """An engine core in this process."""
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    model = ModelRunnerConfig(str(folder), device="cpu", load_format="gguf", max_num_drafts=num_drafts, **LIMITS)
    scheduler = SchedulerConfig(speculative=speculative, **LIMITS)
    return build_engine_core(
        EngineConfig(model, scheduler=scheduler, num_blocks=200, enable_prefix_caching=False, snapshot_steps=0)
    )


def answer(core: EngineCore, name: str, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    """Processor seconds of the steps behind the prompt, and the tokens."""
    core.add_request(EngineCoreRequest(name, prompt, params))
    seconds, tokens = [], []
    while core.has_unfinished_requests():
        start = time.thread_time()
        outputs = core.step().outputs
        seconds.append(time.thread_time() - start)
        tokens += [token for output in outputs for token in output.new_token_ids]
    return sum(seconds[1:]), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = model_folder(given.file)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    without, drafting = make_core(folder, None), make_core(folder, SpeculativeConfig("ngram", 6, is_adaptive=True))
    print("| text | ms of a token | with drafts | ratio | drafts | right |\n|---|---|---|---|---|---|")
    for text, (prompt, values) in TEXTS.items():
        ids = tokenizer.encode(prompt).ids
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **values)
        before, times = drafting.stats(), []
        for turn in range(given.turns):
            alone, tokens = answer(without, f"{text} {turn}", ids, params)
            drafted, same = answer(drafting, f"{text} {turn}", ids, params)
            assert tokens == same, text
            times.append((alone, drafted))
        after = drafting.stats()
        alone, drafted = (median(column) for column in zip(*times, strict=True))
        num_drafts = (after.num_draft_tokens - before.num_draft_tokens) // given.turns
        num_right = (after.num_accepted_draft_tokens - before.num_accepted_draft_tokens) // given.turns
        each = 1e3 / (NUM_TOKENS - 1)
        print(f"| {text} | {alone * each:.1f} | {drafted * each:.1f} | {alone / drafted:.2f} | {num_drafts} "
              f"| {num_right} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
