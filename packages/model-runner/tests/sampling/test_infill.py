"""The sampler `infill`: beside llama.cpp's answers, a plain reference, and in draws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.sampling import Sampler
from llmstack_model_runner.sampling.infill import InfillRule, TokenTexts, kept_tokens
from llmstack_model_runner.sampling.sampler import target_probabilities
from llmstack_structured_output.testing import write_byte_tokenizer
from llmstack_types import EngineStartError, SamplingParams

# Recorded from llama.cpp of October 2026 with SmolLM2: the likeliest tokens of a place with their probabilities, and
# what `top_k`, `top_p` and `infill` leave of them with what probabilities. Tokens 0 and 2 end its texts.
RECORDED = json.loads((Path(__file__).parent / "infill_of_llama_cpp.json").read_text())
ENDS = frozenset({0, 2})


class Texts(TokenTexts):
    """Texts of a test."""

    def __init__(self, token_id_to_text: Mapping[int, bytes]) -> None:
        super().__init__("")
        self._texts = token_id_to_text

    def text_of(self, token_id: int) -> bytes:
        return self._texts[token_id]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["candidates"][0][1].strip() or "end")
def test_it_keeps_what_llama_cpp_keeps(case: dict[str, Any]) -> None:
    token_ids, texts, masses = zip(*case["candidates"], strict=True)
    chances = np.array(masses) / sum(masses)
    num_kept = int((chances.cumsum() < case["top_p"]).sum()) + 1 if case["top_p"] < 1.0 else len(chances)
    chances = chances[:num_kept] / chances[:num_kept].sum()
    rule = InfillRule(
        ENDS, Texts({one: text.encode(errors="surrogateescape") for one, text in zip(token_ids, texts, strict=True)})
    )
    kept = kept_tokens(np.array(token_ids[:num_kept]), chances, rule)
    expected = {int(token_id): chance for token_id, chance in case["kept"].items()}
    if not kept:  # llama.cpp names its end itself
        assert expected == {0: 1.0}
        return
    assert sorted(kept) == sorted(expected)
    mass = {one: chance for one, chance in zip(token_ids, chances, strict=False) if one in kept}
    for token_id, chance in expected.items():  # the draw is by the probabilities before texts were counted together
        assert mass[token_id] / sum(mass.values()) == pytest.approx(chance, abs=1e-3)


def by_the_description(chances: Mapping[int, float], texts: Mapping[int, bytes], ends: frozenset[int]) -> list[int]:
    """What llama.cpp documents, pair by pair."""
    order = sorted(chances, key=lambda one: (-chances[one], one))
    end_mass = sum(chances[one] for one in order if one in ends)
    text_mass = sum(chances[one] for one in order if one not in ends)
    if 3 * end_mass * len(order) > text_mass:
        return [one for one in order if one in ends]
    left = dict(chances)
    for first in order:
        for second in order:
            if first == second or not left[first] or not left[second] or not texts[first]:
                continue
            if texts[second].startswith(texts[first]):
                kept, other = (second, first) if left[second] > left[first] else (first, second)
                left[kept], left[other] = left[kept] + left[other], 0.0
    near = [one for one in order if left[one] and (one in ends or left[one] >= 0.2)]
    num_texts = sum(one not in ends for one in near)
    if not num_texts:
        return []
    mass = sum(left[one] for one in near)
    return [one for one in near if one in ends or left[one] / mass >= 1 / (num_texts + 1)]


WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=9)
TEXTS = st.lists(st.text("ab", max_size=3), min_size=9, max_size=9)


@settings(deadline=None, max_examples=400)
@given(WEIGHTS, TEXTS, st.frozensets(st.integers(0, 11), max_size=2))
def test_it_keeps_what_the_description_says(weights: list[int], names: list[str], ends: frozenset[int]) -> None:
    chances = np.array(weights) / sum(weights)
    texts = {one: name.encode() for one, name in enumerate(names)}
    expected = by_the_description(dict(enumerate(chances.tolist())), texts, ends)
    kept = kept_tokens(np.arange(len(weights)), chances, InfillRule(ends, Texts(texts)))
    assert sorted(kept) == sorted(expected)


def chances_of(logits: list[float], texts: list[str], **fields: Any) -> list[float]:
    """The distribution of a draw; token 0 ends the text."""
    params = SamplingParams(**{"temperature": 1.0, "top_k": 4, "infill": True, **fields})
    rows = make_sampling_rows([SamplingParams()], [[1]], len(logits))
    rows.texts = Texts(dict(enumerate(text.encode() for text in texts)))
    rows.set_row(0, params, np.array([1]), 1, (0,))
    metadata = rows.metadata(np.array([0]), np.array([0]))
    found = target_probabilities(torch.tensor([logits]), metadata)[0]
    drawn = int(Sampler().sample(torch.tensor([logits]), metadata).token_ids)
    assert found[drawn] > 0
    return [round(chance, 4) for chance in found.tolist()]


def log(*chances: float) -> list[float]:
    return [float(np.log(chance)) for chance in chances]


NAMES = ["", "a", "b", "c", "d"]


def test_an_end_that_is_likely_enough_is_the_only_candidate() -> None:
    assert chances_of(log(0.1, 0.6, 0.2, 0.06, 0.04), NAMES) == [1, 0, 0, 0, 0]


def test_neither_top_p_nor_min_p_counts_again_behind_it() -> None:
    found = chances_of(log(0.0001, 0.5, 0.4, 0.06, 0.0399), NAMES, top_p=0.6, min_p=0.5)
    assert found == [0, 0.5556, 0.4444, 0, 0]


def test_texts_that_begin_one_another_count_together() -> None:
    found = chances_of(log(0.001, 0.4, 0.15, 0.25, 0.1), ["", "x", "yes", "y", "ye"])
    assert found == [0, 0.6154, 0, 0.3846, 0]  # `y` counts 0.5 in the choice, and its own 0.25 in the draw


def test_without_a_likely_text_the_likeliest_end_comes_however_unlikely() -> None:
    logits, names = [-300.0, *log(0.16, 0.15, 0.15, 0.15, 0.15, 0.14)], [*NAMES, "e", "f"]
    assert chances_of(logits, names, top_k=6) == [1, 0, 0, 0, 0, 0, 0]
    assert chances_of(logits, names, top_k=6, bad_words_token_ids=((0,),)) == [0, 1, 0, 0, 0, 0, 0]


def test_where_no_end_may_come_the_likeliest_text_does() -> None:
    logits, names = log(0.5, 0.16, 0.15, 0.15, 0.15, 0.15, 0.14), [*NAMES, "e", "f"]
    assert chances_of(logits, names, top_k=7, min_tokens=1) == [0, 1, 0, 0, 0, 0, 0]


def test_the_temperature_comes_before_it() -> None:
    logits = log(0.0001, 0.5, 0.3, 0.15, 0.05)
    assert chances_of(logits, NAMES) == [0, 0.625, 0.375, 0, 0]
    assert chances_of(logits, NAMES, temperature=2.0) == [0, 0.5635, 0.4365, 0, 0]
    assert chances_of(logits, NAMES, temperature=0.2) == [0, 1, 0, 0, 0]


def test_texts_come_from_the_file_of_the_tokenizer(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    texts = TokenTexts(str(tmp_path))
    assert [texts.text_of(one) for one in (65, 0xE2, 256, 999)] == [b"A", b"\xe2", b"", b""]
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "decoder": null}')
    with pytest.raises(ModelFilesError, match="says no bytes of tokens"):
        TokenTexts(str(tmp_path)).text_of(0)
    with pytest.raises(EngineStartError, match="needs a tokenizer"):
        TokenTexts("").text_of(0)
