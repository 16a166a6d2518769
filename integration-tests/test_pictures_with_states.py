"""Pictures of a model whose layers have states: no cut, hit, fork, draft, swap or rank changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES, prepare
from state_engine import build, run

from llmstack_core_scheduler import SpeculativeConfig
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
FAMILY = FAMILIES["qwen 3.5"]
ASKED = [(0,), (0, 1), (1, 0), (2,), ()]
NUM_OUTPUTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("models") / "qwen"
    return folder, FAMILY.write(folder)


def request_of(name: str, seeds: Sequence[int]) -> tuple[EngineCoreRequest, dict[str, Any]]:
    """A request with a picture for each seed, and what transformers reads besides ids."""
    ours, tokens, items, values = FAMILY.ours(), [*range(20)], [], []
    for seed in seeds:
        picture = prepare(ours, FAMILY.sizes[seed], seed)
        items.append(replace(picture.item, offset=len(tokens)))
        values.append(picture.values)
        tokens += [*picture.tokens, 5 + seed, 7]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=1, seed=0)
    inputs = FAMILY.inputs(values, [item.layout for item in items]) if items else {}
    return EngineCoreRequest(name, tokens, params, media=tuple(items)), inputs


def answers_of(reference: Any) -> dict[str, list[int]]:
    found = {}
    for seeds in ASKED:
        request, inputs = request_of(str(seeds), seeds)
        tokens = list(request.prompt_token_ids)
        for _ in range(NUM_OUTPUTS):
            with torch.no_grad():
                given = {**inputs, **FAMILY.by_tokens(tokens)}
                logits = reference(input_ids=torch.tensor([tokens]), use_cache=False, **given).logits
            tokens.append(int(logits[0, -1].argmax()))
        found[str(seeds)] = tokens[-NUM_OUTPUTS:]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 7, "block_size": 8},
        {"max_num_batched_tokens": 23, "async_scheduling": True, "state_snapshot_interval": 32, "block_size": 8},
        {"speculative": SpeculativeConfig("ngram", 4, 2, 1), "block_size": 4},
        {"num_blocks": 12, "num_host_blocks": 100, "block_size": 8, "async_scheduling": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_however_steps_are_made(
    checkpoint: tuple[Path, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    expected = answers_of(checkpoint[1])
    assert len({*map(tuple, expected.values())}) == len(ASKED)
    log_path = tmp_path / "run.steps"
    core = build(checkpoint[0], record_steps=str(log_path), **changes)
    for again in ("", "again "):
        asked = [request_of(f"{again}{seeds}", seeds)[0] for seeds in ASKED]
        forks = [replace(one, request_id=f"fork {one.request_id}", fork_of=one.request_id) for one in asked[:2]]
        for name, sampled in run(core, *asked, *forks).items():
            assert [token for token, _ in sampled] == expected[name.removeprefix("fork ").removeprefix("again ")]
    stats = core.stats()
    core.shutdown()
    assert stats.prefix_cache_hits > 0
    assert stats.encoder is not None
    assert stats.encoder.num_hits > 0
    assert verify(read_step_log(log_path)).num_steps > 10
