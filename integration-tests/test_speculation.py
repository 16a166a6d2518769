"""Drafts over real models: every text is that of an engine that guesses nothing, under all that a scheduler may do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engine import LLAMA, VARIANTS, build, requests

from llmstack_core_scheduler.draft_costs import STEP_BYTES
from llmstack_engine_core import EngineCore, SpeculativeConfig
from llmstack_llm.engine_args import EngineArgs
from llmstack_step_log import read_step_log
from llmstack_step_log.decisions import SCHEDULED, unpack_decision
from llmstack_step_log.replay import verify
from llmstack_types import SchedulerStats, TokenLogprobs

testing = pytest.importorskip("llmstack_model_runner.testing")
runs_native_kernels = pytest.importorskip("llmstack_kernels.testing").runs_native_kernels
transformers = pytest.importorskip("transformers")

LOOKUP = SpeculativeConfig("ngram", 5, prompt_lookup_max=3, prompt_lookup_min=1)
SUFFIX = SpeculativeConfig("suffix", 8)
ADAPTIVE = replace(LOOKUP, is_adaptive=True, step_bytes=STEP_BYTES)  # as the small models here would have no drafts
MAX_TOKENS = 40
MODEL = LLAMA | {"hidden_size": 32, "max_position_embeddings": 128}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "gpt2":
        return str(testing.write_gpt2_checkpoint(folder, seed=5))
    transformers.set_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)
    return str(folder)


Answers = dict[str, tuple[list[int], list[TokenLogprobs], str]]


def run(core: EngineCore) -> tuple[Answers, SchedulerStats]:
    answers = answers_of(core)
    stats = core.stats()
    core.shutdown()
    return answers, stats


def answers_of(core: EngineCore) -> Answers:
    token_ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    reasons: dict[str, str] = {}
    for request in requests(MAX_TOKENS):
        core.add_request(request)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    return {name: (ids, logprobs[name], reasons[name]) for name, ids in token_ids.items()}


@pytest.fixture(scope="module")
def plain(model_path: str) -> Answers:
    answers, stats = run(build(model_path, None))
    assert stats.num_draft_tokens == 0
    return answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_text_depends_on_guesses(model_path: str, plain: Answers, variant: str) -> None:
    answers, stats = run(build(model_path, LOOKUP, **VARIANTS[variant]))
    assert {name: answer[0] for name, answer in answers.items()} == {name: answer[0] for name, answer in plain.items()}
    assert {name: answer[2] for name, answer in answers.items()} == {name: answer[2] for name, answer in plain.items()}
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert sum(stats.num_accepted_draft_tokens_per_place) == stats.num_accepted_draft_tokens
    assert (stats.num_preemptions > 0) == (variant in ("preemption", "swap"))


@pytest.mark.parametrize("variant", ["roomy", "preemption"])
def test_adaptive_drafts_change_no_text_and_are_fewer(
    model_path: str, plain: Answers, variant: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.steps"
    _, fixed = run(build(model_path, LOOKUP, **VARIANTS[variant]))
    core = build(model_path, ADAPTIVE, record_steps=str(path), **VARIANTS[variant])
    answers, stats = run(core)
    assert {name: answer[0] for name, answer in answers.items()} == {name: answer[0] for name, answer in plain.items()}
    assert 0 < stats.num_draft_tokens < fixed.num_draft_tokens
    assert verify(read_step_log(path)).num_steps == stats.step


@pytest.mark.parametrize("variant", ["roomy", "swap"])
def test_answers_are_drafts_of_later_ones_and_change_no_text(
    model_path: str, plain: Answers, variant: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.steps"
    core = build(model_path, SUFFIX, record_steps=str(path), **VARIANTS[variant])
    rounds, nums_accepted = [], [0]
    for _ in range(2):
        rounds.append({name: (answer[0], answer[2]) for name, answer in answers_of(core).items()})
        nums_accepted.append(core.stats().num_accepted_draft_tokens)
    core.shutdown()
    assert rounds == [{name: (answer[0], answer[2]) for name, answer in plain.items()}] * 2
    assert nums_accepted[2] - nums_accepted[1] > 2 * nums_accepted[1] > 0  # the same requests, whose answers are known
    assert verify(read_step_log(path)).num_steps == core.stats().step


def test_a_cpu_drafts_by_default_where_that_changes_no_bit(tmp_path: Path, model_path: str) -> None:
    folder = str(testing.write_gpt2_checkpoint(tmp_path, n_head=2))  # heads that native kernels compute
    speculative = EngineArgs(folder, device="cpu").create_engine_config()[1].scheduler.speculative
    assert speculative is not None
    answers, stats = run(build(folder, replace(speculative, prompt_lookup_min=1, step_bytes=STEP_BYTES)))
    assert (stats.num_draft_tokens > 0) == runs_native_kernels()
    assert answers == run(build(folder, None))[0]  # log-probabilities included
    assert run(build(model_path, speculative))[1].num_draft_tokens == 0  # these heads run in PyTorch


def test_every_accepted_token_has_its_logprobs(model_path: str, plain: Answers) -> None:
    answers, _ = run(build(model_path, LOOKUP))
    for name, (token_ids, logprobs, _) in answers.items():
        assert [entry.token_ids[0] for entry in logprobs] == (token_ids if name.startswith("nucleus") else [])
        for found, expected in zip(logprobs, plain[name][1], strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_right_guesses_save_steps(model_path: str) -> None:
    _, without = run(build(model_path, None))
    _, stats = run(build(model_path, LOOKUP))
    assert stats.step < without.step


def test_a_run_with_drafts_is_derived_again_from_its_log(model_path: str, tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    _, stats = run(build(model_path, LOOKUP, num_blocks=26, record_steps=str(path)))
    report = verify(read_step_log(path))
    assert report.num_steps == stats.step
    assert report.digest == read_step_log(path).last.digest.hex()


def test_the_log_holds_which_drafts_were_scheduled(model_path: str, tmp_path: Path) -> None:
    from llmstack_step_log.replay.derive import Decision, derive_decisions

    path = tmp_path / "run.steps"
    _, stats = run(build(model_path, LOOKUP, record_steps=str(path)))
    recorded = read_step_log(path)
    num_drafts = 0
    for decision in derive_decisions(recorded.events(), recorded.header.build_scheduler()):
        if isinstance(decision, Decision):
            kind, decided = unpack_decision(decision.packed)
            columns = decided.get("scheduled_requests", ()) if kind == SCHEDULED else ()
            num_drafts += sum(len(drafts) for drafts in columns[4].values()) if columns else 0
    assert num_drafts == stats.num_draft_tokens


def test_a_server_guesses_by_a_flag_and_tells_how_well(serve: Callable[..., Any]) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with serve("--speculative-config", json.dumps(given)) as server:
        model = server.client.models.list().data[0].id
        prompt = "The cat sat on the mat. The cat sat on the mat. The cat sat on the"
        answer = server.client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0)
        assert answer.usage is not None
        assert server.get_json("/server_info")["config"]["speculative_config"].items() >= given.items()
        num_draft_tokens = server.metric("vllm:spec_decode_num_draft_tokens_total")
        num_accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < num_accepted <= num_draft_tokens
        rate = server.metric("llmstack:spec_decode_draft_acceptance_rate")
        assert rate == pytest.approx(num_accepted / num_draft_tokens)


def test_a_speculation_that_cannot_be_ends_the_start_with_one_line(launch: Callable[..., Any]) -> None:
    server = launch("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 4}')
    assert server.process.wait(60) != 0
    assert "drafts of the method 'dspark' are not supported yet" in server.log
    assert "Traceback" not in server.log
