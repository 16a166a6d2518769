"""A prompt with pictures whose prefix outlives the engine core: found behind them, with the same tokens and bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES, prepare
from state_engine import build, run

from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def request_of(family: str, name: str, seed: int) -> EngineCoreRequest:
    """Text, a picture and text; `seed` makes the picture."""
    ours, tokens = FAMILIES[family].ours(), [*range(20)]
    picture = prepare(ours, FAMILIES[family].sizes[0], seed)
    items = (replace(picture.item, offset=len(tokens)),)
    tokens += [*picture.tokens, *(5 + place % 11 for place in range(80))]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, seed=0)
    return EngineCoreRequest(name, tokens, params, media=items)


@pytest.mark.parametrize("family", ["qwen 2.5 vl", pytest.param("qwen 3.5", marks=pytest.mark.full)])
def test_the_next_engine_core_goes_on_behind_pictures(tmp_path: Path, family: str) -> None:
    FAMILIES[family].write(tmp_path / "model")
    answers, stats = [], []
    for number in range(3):
        log = tmp_path / f"{number}.steps"
        core = build(tmp_path / "model", kv_cache_dir=str(tmp_path / "cache"), record_steps=str(log))
        answers.append(run(core, request_of(family, "one", seed=1 if number < 2 else 2)))
        stats.append(core.stats().disk)
        core.shutdown()
        assert verify(read_step_log(log)).num_steps > 2
    assert answers[0] == answers[1]
    assert answers[2] != answers[0]
    first, second, other = stats
    assert first is not None
    assert second is not None
    assert other is not None
    length = len(request_of(family, "one", 1).prompt_token_ids)
    assert (first.num_tokens, other.num_tokens) == (0, 0), "another picture is no hit"
    assert second.num_tokens > length - 32
