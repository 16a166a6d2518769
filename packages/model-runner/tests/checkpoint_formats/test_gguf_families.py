"""GGUF files of further families compute what their repositories do, in full precision and in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.gguf_checkpoints import is_rounded, loaded, make_model, rounded, tensors_of, write_file
from model_runner_helpers.gguf_decoders import DECODERS
from model_runner_helpers.gguf_families import FAMILIES

ALL = {**FAMILIES, **DECODERS}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NUM_TOKENS = 8
QUICK = ("deepseek v3",)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def greedy(model: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and tokens behind it, of transformers."""
    tokens = [*PROMPT]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return logits, tokens[len(PROMPT) :]


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ALL]
)
def test_a_file_computes_what_its_repository_does(name: str, tmp_path: Path) -> None:
    family = ALL[name]
    model = make_model(family)
    logits, tokens = greedy(model)
    tensors = tensors_of(family, model, tmp_path / "repository")
    write_file(tmp_path / "plain.gguf", family, model.config, tensors)
    plain = loaded(tmp_path / "plain.gguf")
    assert_close(plain.step([("a", PROMPT)]), logits)
    assert plain.greedy(PROMPT, NUM_TOKENS) == tokens

    for kind in ("Q8_0", "Q4_0"):
        write_file(tmp_path / f"{kind}.gguf", family, model.config, tensors, kind)
        meant = {own: rounded(own, tensor, kind) for own, tensor in tensors.items()}
        write_file(tmp_path / f"meant-{kind}.gguf", family, model.config, meant)
        wanted, few = loaded(tmp_path / f"meant-{kind}.gguf"), loaded(tmp_path / f"{kind}.gguf")
        expected = wanted.step([("a", PROMPT)])
        # 24 layers of Gemma 3n, of which some cut off what is below a deviation, grow the rounding of sums.
        assert_close(few.step([("a", PROMPT)]), expected, 1e-4 if name == "gemma 3n" else 2e-5)
        assert few.greedy(PROMPT, NUM_TOKENS) == wanted.greedy(PROMPT, NUM_TOKENS)
        assert not torch.allclose(expected, logits, atol=1e-3)
        assert sum(is_rounded(own, tensor, kind) for own, tensor in tensors.items()) > 10
