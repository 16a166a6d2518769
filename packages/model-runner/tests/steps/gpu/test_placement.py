"""Whole steps on a GPU of fake tensors: no CPU tensor is mixed with device tensors, and no capture waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.device_runners import needs_native_kernels
from model_runner_helpers.fake_gpu import DEVICE, FakeRuntime, fake_gpu

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_random_adapter, write_random_weights
from llmstack_types import (
    ModelRunnerConfig,
    NewRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)

pytest.importorskip("triton", reason="Triton is not installed (extra `triton` of llmstack-kernels)")
if torch.cuda.is_available():
    pytest.skip("a GPU is at hand: the same steps run there", allow_module_level=True)
try:
    with fake_gpu():
        pass
except (OSError, ValueError) as error:
    pytest.skip(f"there is no fake GPU with this PyTorch: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    needs_native_kernels,
]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GPT: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 96, "n_positions": 64}
GEMMA = SHAPE | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "final_logit_softcapping": 2.0}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
BERT = SHAPE | {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "num_labels": 3}
HYBRID = {
    "num_hidden_layers": 2, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32,
    "attn_layer_indices": [1],
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT,
    "LlamaForCausalLM": SHAPE,
    "Qwen3ForCausalLM": SHAPE | {"head_dim": 16},
    "Gemma2ForCausalLM": GEMMA | {"attn_logit_softcapping": 1.5, "hidden_activation": "gelu_pytorch_tanh"},
    "OPTForCausalLM": SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "BloomForCausalLM": {"hidden_size": 64, "n_head": 4, "n_layer": 1, "vocab_size": 96},
    "GPTNeoXForCausalLM": SHAPE | {"rotary_pct": 0.5},
    "DeepseekV3ForCausalLM": SHAPE | LATENT,
    "DeepseekV32ForCausalLM": SHAPE | LATENT | {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 32},
    "Lfm2ForCausalLM": SHAPE | HYBRID | {"layer_types": ["conv", "full_attention"]},
    "BambaForCausalLM": SHAPE | HYBRID | MAMBA,
    "Qwen3_5ForCausalLM": SHAPE | HYBRID | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3MoeForCausalLM": SHAPE | EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
    "int8": {"quantization": "int8", "dtype": "float16"},
    "deterministic": {"enable_deterministic_inference": True},
    "eager": {"enforce_eager": True},
    "float32": {"dtype": "float32"},
    "more rows than are streamed": {"max_num_seqs": 80},
    "processed log-probabilities": {"logprobs_mode": "processed_logprobs"},
}
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"seed": 3, "top_p": 0.9, "logprobs": 2},
    {"presence_penalty": 0.5, "min_tokens": 2, "stop_token_ids": (1,)},
)
HOST_PARAMS: tuple[dict[str, Any], ...] = (
    {"logit_bias": {5: 1.0}, "frequency_penalty": 2.0, "top_k": 5, "logprobs": 1},
    {"typical_p": 0.8, "min_p": 0.1},
    {"temperature": 0.0, "allowed_token_ids": (1, 2), "bad_words_token_ids": ((7, 8), (9,))},
)


def start(folder: Path, config: dict[str, Any], **options: Any) -> ModelRunner:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 40, "load_format": "dummy", **options}
    runner = ModelRunner(ModelRunnerConfig(str(folder), **options), FakeRuntime())
    runner.load_model()
    assert runner.run_largest_steps() > 0
    runner.initialize_kv_cache(32, 4, 9 if runner.kv_cache_spec().state_group is not None else 0)
    return runner


def generate(runner: ModelRunner, all_params: tuple[dict[str, Any], ...]) -> None:
    driver = StepDriver(runner, 32)
    for index, params in enumerate(all_params):
        driver.add(f"{index}", [index + 1] * 14, SamplingParams(**params))
    driver.run(3)
    assert driver.errors == {}
    assert driver.outputs == {f"{index}": [0] * 3 for index in range(len(all_params))}


IN_EVERY_RUN = {"GPT2LMHeadModel", "Lfm2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.full) for name in DECODERS]
)
def test_decoders_keep_to_the_device(tmp_path: Path, name: str) -> None:
    with fake_gpu():
        runner = start(tmp_path, DECODERS[name] | {"architectures": [name]})
        assert runner.backends()["paged_attention"].startswith("triton")
        generate(runner, PARAMS)


OPTIONS_IN_EVERY_RUN = {"fp8 cache", "int8", "deterministic", "more rows than are streamed"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OPTIONS_IN_EVERY_RUN else pytest.mark.full) for name in OPTIONS]
)
def test_steps_with_all_options_keep_to_the_device(tmp_path: Path, name: str) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"]}
    with fake_gpu():
        generate(start(tmp_path, config, **OPTIONS[name]), PARAMS)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_rows_with_adapters_keep_to_the_device(tmp_path: Path, name: str) -> None:
    targets = {
        "GPT2LMHeadModel": ["wte", "c_attn", "c_fc", "c_proj"],
        "LlamaForCausalLM": ["q_proj", "gate_proj", "lm_head"],
    }
    config = DECODERS[name] | {"architectures": [name], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_random_weights(tmp_path)
    path = write_random_adapter(tmp_path / "adapter", tmp_path, targets[name], seed=1)
    identity = identity_of(path)
    with fake_gpu():
        runner = start(tmp_path, config, enable_lora=True, max_lora_rank=8)
        runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        driver = StepDriver(runner, 32)
        for index, params in enumerate(PARAMS):
            driver.add(f"{index}", [index + 1] * 14, SamplingParams(**params), lora_name=identity if index else None)
        driver.run(3)
        runner.remove_adapter(identity)
    assert driver.errors == {}
    assert driver.outputs == {f"{index}": [0] * 3 for index in range(len(PARAMS))}


def test_the_sampler_of_the_host_keeps_to_the_device(tmp_path: Path) -> None:
    with fake_gpu():
        generate(start(tmp_path, GPT | {"architectures": ["GPT2LMHeadModel"]}), HOST_PARAMS)


def test_drafts_and_token_masks_keep_to_the_device(tmp_path: Path) -> None:
    with fake_gpu():
        runner = start(tmp_path, GPT | {"architectures": ["GPT2LMHeadModel"]}, max_num_drafts=2)
        driver = StepDriver(runner, 32)
        for index, params in enumerate(PARAMS):
            driver.add(f"{index}", [1] * 9, SamplingParams(**params))
        driver.run(2)
        driver.step({f"{index}": 1 for index in range(3)}, {f"{index}": [0, 5] for index in range(3)})
        assert driver.errors == {}
        assert driver.outputs["0"] == [0] * 4  # one draft was right
        allowed = TokenMasks(["masked"], bytearray(b"\xff" * 12))
        new = [NewRequest("masked", [1] * 9, 9, SamplingParams(seed=1))]
        for scheduled in (ScheduledRequest("masked", 0, 9, [31]), ScheduledRequest("masked", 9, 1, [])):
            output = runner.execute_model(SchedulerOutput(9, new, [scheduled]), lambda: allowed).result()
            assert output.sampled_token_ids == [[0]]
            new = []


@pytest.mark.full
def test_swaps_and_sleep_keep_to_the_device(tmp_path: Path) -> None:
    with fake_gpu():
        runner = start(tmp_path, GPT | {"architectures": ["GPT2LMHeadModel"]})
        copies: dict[str, Any] = {"swap_outs": [(1, 2)], "swap_ins": [(2, 5)], "block_copies": [(1, 4), (4, 6)]}
        runner.execute_model(SchedulerOutput(step=0, **copies)).result()
        for level in (1, 2):
            runner.sleep(level)
            runner.wake_up()
            generate(runner, PARAMS[:1])
            runner.sleep(1)
        runner.shutdown()


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2Model"])
def test_pooling_keeps_to_the_device(tmp_path: Path, name: str) -> None:
    kinds = [
        PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED),
        PoolingParams(PoolingType.LAST, task=PoolingTask.TOKEN_EMBED),
        PoolingParams(PoolingType.CLS, task=PoolingTask.CLASSIFY),
    ]
    with fake_gpu():
        runner = start(tmp_path, (GPT if name.startswith("GPT") else BERT) | {"architectures": [name]})
        kinds = kinds if runner.kv_cache_spec().num_labels else kinds[:2]
        new = [NewRequest(f"{i}", [1] * 9, 9, SamplingParams(), pooling_params=kind) for i, kind in enumerate(kinds)]
        scheduled = [ScheduledRequest(request.request_id, 0, 9, [i]) for i, request in enumerate(new)]
        output = runner.execute_model(SchedulerOutput(0, new, scheduled)).result()
    assert output.errors == {}
    assert output.pooled.keys() == {request.request_id for request in new}


def test_a_tensor_of_the_host_is_found() -> None:
    with fake_gpu():
        on_device = torch.zeros(4, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"found at least two devices|Unhandled FakeTensor Device"):
            on_device + torch.ones(4)
        assert torch.equal(torch.ones(2) + 1, torch.tensor([2.0, 2.0]))  # the host's own are computed


def test_a_capture_that_reads_from_the_device_is_found() -> None:
    with fake_gpu():
        numbers = torch.zeros(4, device=DEVICE)
        with pytest.raises(RuntimeError, match="reads a tensor's values"):
            FakeRuntime().capture(lambda: numbers.sum().cpu())
