"""What quantization costs in accuracy: the perplexity of a text by the same model at full precision and in integers.

The text is what the demo model's training held out of its books (`storyteller_training.corpus`); the folder of books is
`LLMSTACK_BENCH_TEXT`. As a command for any model and any text: `python bench_quantization.py MODEL --text FILE`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import LLM, SamplingParams

REPOSITORY = Path(__file__).resolve().parents[3]
SHARED = REPOSITORY.parent / "shared"
BOOKS = Path(os.environ.get("LLMSTACK_BENCH_TEXT", SHARED / "data" / "stories"))
MODELS = {
    "demo": REPOSITORY / "packages/demo-model/src/llmstack_demo_model/model",
    "stories260k": SHARED / "models" / "stories260k",
}
SCHEMES = (None, "int8", "int4")
MAX_WINDOW = 1024


def read_text(path: Path) -> str:
    """A file's text, or what is held out of a folder of books."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    sys.path.insert(0, str(REPOSITORY / "packages/demo-model/train"))
    from storyteller_training.corpus import read_books, split_sections

    _, held_out = split_sections(read_books(path))
    return "\n\n".join("\n\n".join(section.paragraphs) for section in held_out)


@cache
def perplexity(model: Path, scheme: str | None, text: Path, dtype: str = "auto") -> tuple[float, int]:
    """Perplexity per token and number of tokens, over consecutive windows of a context's length."""
    with LLM(str(model), quantization=scheme, dtype=dtype, enable_prefix_caching=False) as llm:
        token_ids = llm.get_tokenizer().encode(read_text(text))
        window = min(llm.llm_engine.model_config.max_model_len - 1, MAX_WINDOW)
        prompts = [token_ids[start : start + window] for start in range(0, len(token_ids) - 1, window)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        logprobs = [one for output in llm.generate(prompts, params, use_tqdm=False) for one in _logprobs(output)]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def _logprobs(output: Any) -> Iterable[float]:
    """Of each prompt token but the first."""
    for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        yield entry[token_id].logprob


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_perplexity(benchmark: Any, name: str, scheme: str | None) -> None:
    """One pass over the text; the figures are in `extra_info`."""
    pytest.importorskip("llmstack_model_runner")
    for needed in (BOOKS, MODELS[name]):
        if not needed.is_dir():
            pytest.skip(f"{needed} is not there")
    benchmark.pedantic(lambda: perplexity(MODELS[name], scheme, BOOKS), rounds=1)
    full, _ = perplexity(MODELS[name], None, BOOKS)
    found, num_tokens = perplexity(MODELS[name], scheme, BOOKS)
    benchmark.extra_info.update(perplexity=found, difference=found - full, num_tokens=num_tokens)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=list(MODELS.values()), help="folders of models")
    parser.add_argument("--text", type=Path, default=BOOKS, help="a file, or a folder of books as *.txt")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    print("| model | weights | perplexity | difference | tokens |\n|---|---|---|---|---|")
    for model in options.models:
        full, _ = perplexity(model, None, options.text, options.dtype)
        for scheme in SCHEMES:
            found, num_tokens = perplexity(model, scheme, options.text, options.dtype)
            change = f"{found - full:+.3f} ({found / full - 1:+.2%})" if scheme else ""
            print(
                f"| {model.name} | {scheme or 'full precision'} | {found:.3f} | {change} | {num_tokens:,} |", flush=True
            )


if __name__ == "__main__":
    main()
