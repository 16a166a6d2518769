"""Tokens and log-probabilities of a request alone are, bit for bit, those in a crowd that has hardly any room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams, SchedulerStats, TokenLogprobs

testing = pytest.importorskip("llmstack_model_runner.testing")

LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 128}
SPECULATIVE = SpeculativeConfig("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=1)
CROWDS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tiny steps": {"limits": {"max_num_batched_tokens": 9}},
    "preemption": {"num_blocks": 16, "limits": {"max_num_batched_tokens": 23}},
    "swap": {"num_blocks": 16, "num_host_blocks": 64},
    "drafts": {"speculative": SPECULATIVE, "num_blocks": 40},
    "scheduling ahead": {"async_scheduling": True, "limits": {"max_num_batched_tokens": 17}},
    "no prefix cache": {"enable_prefix_caching": False},
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    "seeded": SamplingParams(temperature=1.3, seed=7, max_tokens=24, ignore_eos=True, logprobs=3),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.9, seed=8, max_tokens=24, ignore_eos=True, logprobs=0),
}

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Heads of 16, which native attention takes.
    return str(testing.write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"), seed=5, spread=0.35, n_embd=48, n_head=3))


def build(
    model_path: str,
    num_blocks: int = 128,
    limits: dict[str, int] | None = None,
    speculative: SpeculativeConfig | None = None,
    **changes: Any,
) -> EngineCore:
    values = LIMITS | (limits or {})
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    model = ModelRunnerConfig(
        model_path, dtype="bfloat16", block_size=8, device="cpu", max_num_drafts=num_drafts, **values
    )
    scheduler = SchedulerConfig(speculative=speculative, **values)
    return build_engine_core(EngineConfig(model, scheduler=scheduler, num_blocks=num_blocks, **changes))


def requests() -> list[EngineCoreRequest]:
    common = [(5 * position + 1) % 89 for position in range(40)]
    prompts = [[*common, 90], common[:19] + [91, 92] * 9, [3, 1, 4]]
    return [
        EngineCoreRequest(f"{kind} {index}", prompt, params)
        for index, prompt in enumerate(prompts)
        for kind, params in PARAMS.items()
    ]


def run(core: EngineCore, batches: Iterable[list[EngineCoreRequest]]) -> tuple[Answers, SchedulerStats]:
    answers: Answers = {}
    for batch in batches:
        for request in batch:
            core.add_request(request)
        while core.has_unfinished_requests():
            for output in core.step().outputs:
                assert output.error is None
                token_ids, logprobs = answers.setdefault(output.request_id, ([], []))
                token_ids.extend(output.new_token_ids)
                logprobs.extend(output.logprobs or ())
    stats = core.stats()
    core.shutdown()
    return answers, stats


@pytest.fixture(scope="module")
def alone(model_path: str) -> Answers:
    core = build(model_path, enable_prefix_caching=False)
    if core.ready.backends["numeric_contract"] != "holds":
        pytest.skip(f"numeric contract: {core.ready.backends['numeric_contract']}")
    return run(core, ([request] for request in requests()))[0]


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_crowd_changes_neither_a_token_nor_a_bit_of_a_logprob(model_path: str, alone: Answers, crowd: str) -> None:
    answers, stats = run(build(model_path, **CROWDS[crowd]), [requests()])
    assert answers == alone
    assert (stats.num_preemptions > 0) == (crowd in ("preemption", "swap"))
    assert (stats.num_draft_tokens > 0) == (crowd == "drafts")


def test_the_texts_differ_among_each_other(alone: Answers) -> None:
    """Else they would prove little."""
    assert len({tuple(token_ids) for token_ids, _ in alone.values()}) == len(alone)
    assert min(len(set(token_ids)) for token_ids, _ in alone.values()) > 3
