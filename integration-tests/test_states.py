"""Layers with a state: no cut, hit, fork, preemption, draft or failure changes a bit of what a model computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from state_engine import (
    NUM_OUTPUT_TOKENS,
    OTHER_FAMILIES,
    PROMPTS,
    SHARED,
    STATE_DTYPES,
    VOCAB_SIZE,
    WINDOWED,
    WINDOWED_CLASS,
    build,
    requests,
    run,
    run_twice,
    uncut_answers,
    write_checkpoint,
    write_windowed_checkpoint,
)

from llmstack_core_scheduler import SpeculativeConfig
from llmstack_insight.explain import add_prefix_match, explain
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreRequest, SamplingParams


@pytest.fixture(
    scope="module",
    params=["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in [*OTHER_FAMILIES, "windowed"])],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("models") / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cast("dict[str, str]", ARCHITECTURES), WINDOWED, WINDOWED_CLASS)
        if request.param == "windowed":
            yield folder, write_windowed_checkpoint(folder)
        else:
            yield folder, write_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def uncut(checkpoint: tuple[Path, Any]) -> dict[str, list[Any]]:
    return uncut_answers(checkpoint[0])


def test_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]]) -> None:
    for number, prompt in enumerate(PROMPTS):
        output = checkpoint[1].generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False,
        )  # fmt: skip
        assert [token_id for token_id, _ in uncut[f"0_{number}"]] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 7, "block_size": 8},
        {"max_num_batched_tokens": 23, "async_scheduling": True},
        {"max_num_batched_tokens": 1, "block_size": 1, "num_blocks": 20_000},
        {"state_snapshot_interval": 32, "block_size": 8},
        {"speculative": SpeculativeConfig("ngram", 4, 2, 1)},
    ],
    ids=str,
)
def test_cuts_and_hits_and_forks_change_no_bit(
    checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    log_path = tmp_path / "run.steps"
    core = build(checkpoint[0], record_steps=str(log_path), **changes)
    for answers in run_twice(core):
        assert answers == uncut
    stats = core.stats()
    core.shutdown()
    assert stats.prefix_cache_hits > 0
    assert stats.prefix_tokens_without_state > 0 or changes.get("block_size") == 1  # shared blocks beyond a state
    assert stats.num_free_blocks == stats.num_blocks
    assert verify(read_step_log(log_path)).num_steps > 20


def test_a_hit_ends_at_every_boundary_of_a_prompt(checkpoint: tuple[Path, Any]) -> None:
    """Where an earlier prompt ended, whatever follows."""
    core = build(checkpoint[0], block_size=8)
    plain = build(checkpoint[0], block_size=8, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, seed=0)
    for number in range(1, 17):
        prompt = SHARED[: 8 * number + 3]
        before = core.stats().prefix_cache_hits
        request = EngineCoreRequest(f"boundary_{number}", [*prompt, 5, 6], params)
        assert run(core, request) == run(plain, request)
        assert core.stats().prefix_cache_hits - before == 8 * (number - 1)
    assert core.stats().prefix_tokens_without_state == 0
    for one in (core, plain):
        one.shutdown()


def test_tokens_without_a_state_are_counted_and_leave_one(checkpoint: tuple[Path, Any]) -> None:
    core = build(checkpoint[0], max_num_batched_tokens=200)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    for name, hits, without_state in (("first", 0, 0), ("second", 0, 64), ("third", 64, 64)):
        run_core = [*SHARED[:64], *([ord(name[0]) % VOCAB_SIZE] * 70)] if name != "first" else SHARED[:140]
        core.add_request(EngineCoreRequest(name, run_core, params))
        while core.has_unfinished_requests():
            core.step()
        assert (core.stats().prefix_cache_hits, core.stats().prefix_tokens_without_state) == (hits, without_state)
    core.shutdown()


@pytest.mark.parametrize(
    ("num_host_blocks", "async_scheduling", "block_size"), [(0, False, 16), (400, True, 4), (400, False, 16)]
)
def test_preemption_and_swaps_change_no_bit(
    checkpoint: tuple[Path, Any],
    uncut: dict[str, list[Any]],
    tmp_path: Path,
    num_host_blocks: int,
    async_scheduling: bool,
    block_size: int,
) -> None:
    log_path = tmp_path / "run.steps"
    longest = max(map(len, PROMPTS)) + NUM_OUTPUT_TOKENS
    num_blocks = (1 + longest // block_size) * (2 if checkpoint[0].name == "windowed" else 1)  # for as many groups
    core = build(
        checkpoint[0], num_blocks, block_size=block_size, num_host_blocks=num_host_blocks,
        async_scheduling=async_scheduling, record_steps=str(log_path),
    )  # fmt: skip
    for answers in run_twice(core):
        assert answers == uncut
    stats = core.stats()
    core.shutdown()
    assert stats.num_preemptions > 0
    assert verify(read_step_log(log_path)).num_steps > 20


def failing(function: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """The function, whose calls of these numbers fail after they have done their work."""
    count = iter(range(10**6))

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if next(count) in numbers:
            raise RuntimeError("the step fails")
        return result

    return call


def test_a_step_that_fails_is_run_again_in_parts_to_the_same_bits(
    checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]]
) -> None:
    core = build(checkpoint[0], max_num_batched_tokens=23)
    steps: Any = core.runner
    model = steps._model
    model.forward = failing(model.forward, (2, 9, 10, 20))  # whole steps, and halves of one
    for answers in run_twice(core):
        assert answers == uncut
    core.shutdown()


def test_a_request_that_goes_on_in_another_engine_gets_the_same_bits(
    checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]]
) -> None:
    """As after the death of an engine core, whose tokens so far are known."""
    core = build(checkpoint[0])
    resumed = []
    for request in requests():
        known = tuple(token_id for token_id, _ in uncut[request.request_id][:5])
        resumed.append(replace(request, output_token_ids=known, fork_of=""))
    assert run(core, *resumed) == {name: sampled[5:] for name, sampled in uncut.items()}
    core.shutdown()


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_ranks_write_the_same_tokens(
    checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]], ranks: dict[str, int]
) -> None:
    if checkpoint[0].name == "windowed":
        pytest.skip("the processes of ranks know no class of these tests")
    core = build(checkpoint[0], **ranks)
    for answers in run_twice(core):
        for number in range(len(PROMPTS)):
            name = f"0_{number}"
            assert [token for token, _ in answers[name]] == [token for token, _ in uncut[name]]
        if "pipeline_parallel_size" in ranks:  # stages sum nothing over ranks
            assert answers == uncut
    assert core.stats().prefix_cache_hits > 0
    core.shutdown()


def test_states_keep_their_type_beside_8_bit_keys_and_values(checkpoint: tuple[Path, Any]) -> None:
    answers = []
    for tokens in (256, 23):
        core = build(checkpoint[0], dtype="bfloat16", kv_cache_dtype="fp8", max_num_batched_tokens=tokens)
        runner: Any = core.runner
        group = runner.kv_cache_spec().state_group
        assert [tensor.dtype for tensor in group.tensors] == STATE_DTYPES[checkpoint[0].name]
        answers.append(run_twice(core))
        core.shutdown()
    assert answers[0][0] == answers[1][0] == answers[1][1]


def test_sleep_and_wake_forget_the_states(checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]]) -> None:
    core = build(checkpoint[0])
    assert run(core) == uncut
    core.reset_prefix_cache()
    core.runner.sleep(1)
    core.runner.wake_up()
    assert run(core) == uncut
    core.shutdown()


@pytest.mark.parametrize("checkpoint", ["lfm2"], indirect=True)
def test_a_configuration_as_published_is_read(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """With the names of older checkpoints: numbers of attention layers, `block_ff_dim`, `tie_embedding`."""
    published = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "torch_dtype": "float32", "vocab_size": VOCAB_SIZE,
        "hidden_size": 64, "block_dim": 32, "block_ff_dim": 96, "block_multiple_of": 8, "block_norm_eps": 1e-05,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_use_swiglu": True,
        "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "norm_eps": 1e-05,
        "full_attn_idxs": [2, 4], "num_hidden_layers": 6, "num_attention_heads": 4, "num_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 1000000.0, "theta": 1000000.0,
        "tie_embedding": True, "use_cache": True, "use_pos_enc": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "model.safetensors").write_bytes((checkpoint[0] / "model.safetensors").read_bytes())
    core = build(tmp_path)
    other = build(checkpoint[0])
    assert run(core) == run(other)
    for one in (core, other):
        one.shutdown()


def test_beams_fork_from_the_state_after_all_their_tokens(checkpoint: tuple[Path, Any]) -> None:
    plain = build(checkpoint[0], enable_prefix_caching=False, max_num_batched_tokens=200)
    core = build(checkpoint[0], max_num_batched_tokens=23)
    params = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
    for number, prompt in enumerate(PROMPTS):
        beams: list[dict[str, list[int]]] = []
        for one in (plain, core):
            for index in range(3):
                fork_of = f"{number}_0" if index else ""
                one.add_request(EngineCoreRequest(f"{number}_{index}", prompt, params, fork_of=fork_of))
            found: dict[str, list[int]] = {}
            while one.has_unfinished_requests():
                for output in one.step().outputs:
                    assert output.error is None
                    found.setdefault(output.request_id, []).extend(output.new_token_ids)
            beams.append(found)
        assert beams[0] == beams[1]
        assert [len(tokens) for tokens in beams[0].values()] == [12, 12, 12]
    assert core.stats().num_forks > 60  # each but a few begins from a state that is shared
    for one in (core, plain):
        one.shutdown()


def test_the_explanation_says_where_no_state_was_found(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    log_path = tmp_path / "run.steps"
    core = build(checkpoint[0], max_num_batched_tokens=200, record_steps=str(log_path))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0)
    run_tokens = {"before": SHARED[:140], "r": [*SHARED[:70], *range(40)]}
    for name, prompt in run_tokens.items():
        core.add_request(EngineCoreRequest(name, prompt, params))
        while core.has_unfinished_requests():
            core.step()
    core.shutdown()
    recorded = read_step_log(log_path)
    log = steps_of_log(recorded, 1000)
    made = explain(log, "r")
    add_prefix_match(made, recorded, log, recorded.header.configs()[1], None)
    assert (
        "Its first 70 tokens are also those of before, but at no block boundary after token 0 were its blocks and a "
        "state found."
    ) in made.sentences
