"""Drafts by a model: every text is that of the served model alone, under all that a scheduler may do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_engine
import state_engine
from small_engine import LLAMA, requests

from llmstack_engine_core import EngineCore, SpeculativeConfig
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams

testing = pytest.importorskip("llmstack_model_runner.testing")
transformers = pytest.importorskip("transformers")
stand_ins = pytest.importorskip("model_runner_helpers.cpu_stand_in")

NUM_DRAFTS = 4
MAX_TOKENS = 32
VARIANTS = small_engine.VARIANTS | {
    "on a device": {"runner": "model_runner_helpers.cpu_stand_in:StandInModelRunner"},
}
MODEL = LLAMA | {"hidden_size": 64, "max_position_embeddings": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The served model, another of its vocabulary, and some that can be no draft model for it."""
    others = {
        "served": (3, {}), "other": (4, {"num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 64}),
        "of 98 tokens": (5, {"vocab_size": 98}),
    }  # fmt: skip
    found = {}
    for name, (seed, values) in others.items():
        folder = tmp_path_factory.mktemp("model")
        transformers.set_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL | values)).save_pretrained(folder)
        found[name] = str(folder)
    folder = tmp_path_factory.mktemp("states")
    state_engine.write_checkpoint(folder)
    return found | {"with states": str(folder)}


def build(model_path: str, draft: str = "", **changes: Any) -> EngineCore:
    is_adaptive = changes.pop("is_adaptive", False)
    if not draft:
        return small_engine.build(model_path, **changes)
    speculative = SpeculativeConfig("draft_model", NUM_DRAFTS, model=draft, is_adaptive=is_adaptive)
    model = {"draft_model_path": draft, "draft_max_model_len": 64}
    return small_engine.build(model_path, speculative, model=model, **changes)


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[float]]:
    """Each request's tokens, and the log-probabilities that were asked for."""
    answers: dict[str, list[float]] = {}
    logprobs: dict[str, list[float]] = {}
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            entries = [value for entry in output.logprobs or () for value in entry.token_ids + entry.logprobs]
            logprobs.setdefault(output.request_id, []).extend(entries)
    return {name: token_ids + logprobs[name] for name, token_ids in answers.items()}


def check_equal(answers: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert answers.keys() == expected.keys()
    for name, values in answers.items():
        assert values == pytest.approx(expected[name], abs=1e-4), name


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> dict[str, list[float]]:
    return run(build(models["served"]), *requests(MAX_TOKENS))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("draft", ["served", "other"])
def test_no_text_depends_on_a_draft_model(
    models: dict[str, str], plain: dict[str, list[float]], draft: str, variant: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.steps"
    core = build(models["served"], models[draft], record_steps=str(path), **VARIANTS[variant])
    answers, stats = run(core, *requests(MAX_TOKENS)), core.stats()
    core.shutdown()
    check_equal(answers, plain)
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_draft_tokens > 20) == (draft == "served")
    assert (stats.num_preemptions > 0) == (variant in ("preemption", "swap"))
    assert stats.num_free_blocks == stats.num_blocks
    assert verify(read_step_log(path)).num_steps == stats.step


@pytest.mark.parametrize("variant", ["roomy", "preemption", "swap", "on a device"])
def test_every_greedy_draft_of_the_served_model_itself_is_right(models: dict[str, str], variant: str) -> None:
    """Also where the prompt, or what was computed before a preemption, is found and not computed by the row."""
    core, alone = (build(models["served"], draft, **VARIANTS[variant]) for draft in (models["served"], ""))
    for turn in range(3):
        prompts = [[11, 22, 33, 44, 55, 7, 8, 9, 10 * (number > 1), number, 3, 4] for number in range(4)]
        batch = [EngineCoreRequest(f"{turn} {number}", one, GREEDY) for number, one in enumerate(prompts)]
        assert run(core, *batch) == run(alone, *batch)
    stats = core.stats()
    assert stats.prefix_cache_hits > 0
    # After a swap several rows are read again, which takes the draft model more tokens than a step may have.
    least = stats.num_draft_tokens if variant != "swap" else 0.95 * stats.num_draft_tokens
    assert least <= stats.num_accepted_draft_tokens
    assert stats.num_draft_tokens > 300
    assert stats.step < 0.5 * alone.stats().step


def test_a_draft_model_that_costs_too_much_is_not_asked(models: dict[str, str], plain: dict[str, list[float]]) -> None:
    core = build(models["served"], models["served"], is_adaptive=True)
    check_equal(run(core, *requests(MAX_TOKENS)), plain)
    assert core.stats().num_draft_tokens == 0  # each draft takes as long as the step that it may spare


def test_a_cheap_draft_model_is_asked_while_it_is_right(models: dict[str, str], plain: dict[str, list[float]]) -> None:
    core = build(models["served"], models["other"], is_adaptive=True)
    fixed = build(models["served"], models["other"])
    check_equal(run(core, *requests(MAX_TOKENS)), plain)
    check_equal(run(fixed, *requests(MAX_TOKENS)), plain)
    assert core.stats().num_draft_tokens < 0.3 * fixed.stats().num_draft_tokens


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_a_served_model_with_states_has_drafts_by_another(family: str, models: dict[str, str], tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path / "served", family)
    expected = state_engine.uncut_answers(tmp_path / "served")
    speculative = SpeculativeConfig("draft_model", NUM_DRAFTS, model=models["served"])
    core = state_engine.build(tmp_path / "served", speculative=speculative, block_size=8)
    for answers in state_engine.run_twice(core):
        assert answers == expected
    assert core.stats().num_draft_tokens > 0
    core.shutdown()


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("of 98 tokens", "the draft model has a vocabulary of 98 tokens, and the served one of 97"),
        ("with states", "its layers keep a state of all tokens"),
    ],
)
def test_what_can_be_no_draft_model_ends_the_start(models: dict[str, str], draft: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(models["served"], models[draft])


def test_the_storage_of_a_draft_model_is_part_of_the_cache(models: dict[str, str]) -> None:
    alone, beside = build(models["served"]), build(models["served"], models["other"])
    block_bytes = 2 * 4 * 2 * 16 * 4  # keys and values of 4 tokens, in 2 heads of 16 numbers of 4 bytes
    assert beside.ready.kv_cache_bytes - alone.ready.kv_cache_bytes == 144 * block_bytes


def test_a_server_drafts_by_a_model_and_goes_on_after_a_crash(serve: Callable[..., Any]) -> None:
    given = {"model": str(pytest.importorskip("llmstack_demo_model").model_path()), "num_speculative_tokens": 3}
    options = ("--speculative-config", json.dumps(given | {"is_adaptive": False}))
    prompt = "Once upon a time"
    with serve("--speculative-config", '{"method": "none"}') as server:
        model = server.client.models.list().data[0].id
        expected = server.client.completions.create(model=model, prompt=prompt, max_tokens=400, temperature=0)
    with serve(*options, "--max-engine-restarts", "3") as server:
        asked: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 400, "temperature": 0}
        stream = server.client.completions.create(**asked, stream=True)
        chunks = [next(stream).choices[0].text for _ in range(4)]
        os.kill(server.engine_pid(), signal.SIGKILL)
        chunks += [chunk.choices[0].text for chunk in stream]
        assert "".join(chunks) == expected.choices[0].text
        info = server.get_json("/server_info")["config"]["speculative_config"]
        assert info.items() >= (given | {"method": "draft_model"}).items()
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < accepted <= server.metric("vllm:spec_decode_num_draft_tokens_total")
