"""States in a small memory, in another engine core, and of a model with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from state_engine import (
    CONFIG,
    NUM_OUTPUT_TOKENS,
    OTHER_FAMILIES,
    PROMPTS,
    build,
    requests,
    run,
    run_twice,
    uncut_answers,
    write_checkpoint,
)

from llmstack_engine_core import EngineCore
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferLimits
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineCoreOutput, EngineCoreRequest, EngineStartError, KVTransferParams, SamplingParams
from llmstack_types.model_runner import LEAST_STATE_BLOCKS


@pytest.fixture(
    scope="module", params=["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_FAMILIES)]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("models") / request.param
    return folder, write_checkpoint(folder, request.param)


@pytest.fixture(scope="module")
def uncut(checkpoint: tuple[Path, Any]) -> dict[str, list[Any]]:
    return uncut_answers(checkpoint[0])


@pytest.mark.parametrize(
    "ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["one rank", "tensor", "pipeline"]
)
def test_a_prompt_that_another_engine_core_has_computed_goes_on_from_its_state(
    checkpoint: tuple[Path, Any], tmp_path: Path, ranks: dict[str, int]
) -> None:
    limits = TransferLimits(import_timeout_s=300.0)
    configs = [
        KVTransferConfig("SharedMemoryConnector", role, "recompute", limits) for role in ("kv_producer", "kv_consumer")
    ]
    logs = [tmp_path / f"{role}.steps" for role in ("producer", "consumer")]
    producer, consumer = (
        build(checkpoint[0], kv_transfer=config, record_steps=str(log), **ranks)
        for config, log in zip(configs, logs, strict=True)
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, seed=0)
    for number, prompt in enumerate(PROMPTS):
        plain = EngineCoreRequest(f"plain_{number}", prompt, params)
        expected = [token for output in outputs_of(producer, plain) for token in output.new_token_ids]
        ask = replace(plain, request_id=f"ask_{number}", kv_transfer=KVTransferParams(do_remote_decode=True))
        exported = outputs_of(producer, replace(ask, sampling_params=replace(params, max_tokens=1)))[-1].kv_transfer
        if exported is None:
            assert len(prompt) <= 16
            continue
        assert exported.num_tokens == (len(prompt) - 1) // 16 * 16
        given = exported._replace(do_remote_decode=False, do_remote_prefill=True)
        found = outputs_of(consumer, replace(plain, request_id=f"found_{number}", kv_transfer=given))
        assert found[0].num_cached_tokens == exported.num_tokens
        assert [token for output in found for token in output.new_token_ids] == expected
    assert consumer.stats().prefix_cache_hits > 100
    for core in (producer, consumer):
        core.shutdown()
    assert all(verify(read_step_log(log)).num_steps > 20 for log in logs)


def outputs_of(core: EngineCore, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    """All outputs of one request."""
    core.add_request(request)
    found: list[EngineCoreOutput] = []
    while core.has_unfinished_requests():
        found += core.step().outputs
    assert all(output.error is None for output in found)
    return found


@pytest.mark.parametrize("num_host_blocks", [0, 200])
def test_rows_beyond_the_states_that_there_is_room_for_wait(
    checkpoint: tuple[Path, Any], uncut: dict[str, list[Any]], num_host_blocks: int
) -> None:
    """Six rows were asked for; the bytes suffice for the states of two, then for one that finds none again."""
    spec = build(checkpoint[0]).runner.kv_cache_spec()
    for num_bytes, num_rows in (
        (spec.num_bytes_for_rows(2, 16), 2),
        (spec.num_cache_bytes(16, LEAST_STATE_BLOCKS), 1),
    ):
        core = build(checkpoint[0], None, kv_cache_bytes=num_bytes, num_host_blocks=num_host_blocks)
        assert core.ready.max_num_rows == num_rows
        most = 0
        for request in requests():
            core.add_request(request)
        answers: dict[str, list[Any]] = {}
        while core.has_unfinished_requests():
            for output in core.step().outputs:
                assert output.error is None
                sampled = zip(output.new_token_ids, output.logprobs or [], strict=True)
                answers.setdefault(output.request_id, []).extend(sampled)
            most = max(most, core.stats().num_running)
        assert most == num_rows
        assert answers == uncut
        core.shutdown()


def test_a_cache_without_room_for_the_states_of_one_row_is_refused(checkpoint: tuple[Path, Any]) -> None:
    spec = build(checkpoint[0]).runner.kv_cache_spec()
    least = spec.num_cache_bytes(1, LEAST_STATE_BLOCKS)
    with pytest.raises(EngineStartError, match=f"needs at least {least} bytes for one block of 16 tokens and 3 states"):
        build(checkpoint[0], None, kv_cache_bytes=least - 1)


def test_experts_beside_convolutions_change_no_bit_either(tmp_path: Path) -> None:
    torch.manual_seed(2)
    values = {name: value for name, value in CONFIG.items() if name != "block_multiple_of"}
    values |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1}
    model = transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**values)).eval()
    model.save_pretrained(tmp_path)
    plain = build(tmp_path, max_num_batched_tokens=256, enable_prefix_caching=False)
    whole = run(plain, *(replace(one, fork_of="") for one in requests()))
    core = build(tmp_path, max_num_batched_tokens=23)
    for answers in run_twice(core):
        assert answers == whole
    assert core.stats().prefix_cache_hits > 0
    for one in (plain, core):
        one.shutdown()
    for number, prompt in enumerate(PROMPTS):
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False,
        )  # fmt: skip
        assert [token_id for token_id, _ in whole[f"0_{number}"]] == output[0, len(prompt) :].tolist()
