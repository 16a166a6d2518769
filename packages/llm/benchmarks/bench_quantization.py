"""What quantization costs in accuracy: the perplexity of a text by the same model with fewer bits.

The text is what the demo model's training held out of its books (`storyteller_training.corpus`); the folder of books is
`LLMSTACK_BENCH_TEXT`. As a command for any model and any text: `python bench_quantization.py MODEL --text FILE`.
`held_text.txt` is prose of this repository, which no model has learned that is older than it.

A GGUF file is measured as it is, then its weights in float32 as a checkpoint, which is quantized while it is loaded.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
FULL = "full precision"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    FULL: {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8_dynamic": {"quantization": "int8_dynamic"},
    "int4": {"quantization": "int4"},
    "int4_dynamic": {"quantization": "int4_dynamic"},
    "fp8": {"quantization": "fp8"},
    "KV cache in fp8": {"kv_cache_dtype": "fp8"},
}
FILE_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    f"the file, {dtype}, {activations} inputs": {"dtype": dtype, "gguf_activations": activations}
    for dtype in ("float32", "bfloat16")
    for activations in ("exact", "rounded")
}
"""What a row of the table is called, and the options that make it."""
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
def perplexity(model: Path, variant: str, text: Path, dtype: str = "auto") -> tuple[float, int]:
    """Perplexity per token and number of tokens, over consecutive windows of a context's length."""
    options: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False, "pack_cache": False}
    options |= VARIANTS[variant] if variant in VARIANTS else FILE_VARIANTS[variant]
    with LLM(str(model), **options) as llm:
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


@contextmanager
def full_precision(model: Path) -> Iterator[Path]:
    """The weights of a GGUF file in float32, as a folder that lives as long as the context; a folder as it is."""
    if model.is_dir():
        yield model
        return
    import torch
    import transformers

    from llmstack_model_files import resolve_model

    with tempfile.TemporaryDirectory() as made:
        read = transformers.AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
        read.config.quantization_config, read.hf_quantizer = None, None  # what forbids to save it
        read.save_pretrained(made)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(made) / name).write_bytes((Path(resolve_model(str(model))) / name).read_bytes())
        yield Path(made)


@pytest.mark.parametrize("scheme", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_perplexity(benchmark: Any, name: str, scheme: str) -> None:
    """One pass over the text; the figures are in `extra_info`."""
    pytest.importorskip("llmstack_model_runner")
    for needed in (BOOKS, MODELS[name]):
        if not needed.is_dir():
            pytest.skip(f"{needed} is not there")
    benchmark.pedantic(lambda: perplexity(MODELS[name], scheme, BOOKS), rounds=1)
    full, _ = perplexity(MODELS[name], FULL, BOOKS)
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
        _print_rows(model, options.text, options.dtype)


def _print_rows(model: Path, text: Path, dtype: str) -> None:
    with full_precision(model) as folder:
        rows = [(folder, name) for name in VARIANTS]
        if folder != model:
            rows += [(model, name) for name in FILE_VARIANTS]
        full, _ = perplexity(folder, FULL, text, dtype)
        for path, name in rows:
            found, num_tokens = perplexity(path, name, text, dtype)
            change = "" if name == FULL else f"{found - full:+.3f} ({found / full - 1:+.2%})"
            print(f"| {model.name} | {name} | {found:.3f} | {change} | {num_tokens:,} |", flush=True)


if __name__ == "__main__":
    main()
