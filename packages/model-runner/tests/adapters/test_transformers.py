"""Adapters over transformers' code write what transformers writes with the adapter merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmstack_model_runner.adapters.config import AdapterError
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of
from llmstack_types import ModelRunnerConfig, SamplingParams

transformers = pytest.importorskip("transformers")

NUM_BLOCKS, NUM_TOKENS = 128, 8
PROMPTS = ([5, 17, 2, 44, 8, 1, 30], [5, 17, 2, 44, 90, 3], [11])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "initializer_range": 0.3,
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TARGETS = ("q_proj", "v_proj", "o_proj", "mlp.up_proj", "mlp.down_proj", "shared_experts.gate_proj")


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**CONFIG)).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, targets: tuple[str, ...], seed: int, rank: int = 3) -> Path:
    """An adapter as peft writes it, with the names of the checkpoint's modules."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets):
            for factor, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                values = torch.randn(shape, generator=generator) * 0.3
                tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_outputs(base: Path, adapter: Path | None) -> list[list[int]]:
    """What transformers writes, one prompt at a time."""
    model = transformers.Glm4MoeForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        factors = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in factors if name.endswith("lora_A.weight")]:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            with torch.no_grad():
                update = 2 * factors[name.replace("_A", "_B")].double() @ factors[name].double()
                module.weight.copy_(module.weight.double() + update)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def make_runner(base: Path) -> ModelRunner:
    settings: dict[str, Any] = {"model_impl": "transformers", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    runner = ModelRunner(ModelRunnerConfig(str(base), dtype="float32", max_model_len=64, block_size=4, **settings))
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


def test_tokens_are_those_of_the_merged_models_in_one_batch(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    paths = [write_adapter(tmp_path / "a", base, TARGETS, 1), write_adapter(tmp_path / "b", base, TARGETS[:1], 2, 7)]
    expected = [merged_outputs(base, path) for path in (None, *paths)]
    assert expected[0] != expected[1] != expected[2]
    runner = make_runner(base)
    driver = StepDriver(runner, NUM_BLOCKS)
    names = [identity_of(path, path.name) for path in paths]
    for name, path in zip(names, paths, strict=True):
        runner.add_adapter(name, runner.read_adapter(name, str(path)))
    for slot, name in enumerate((None, *names)):
        for number, prompt in enumerate(PROMPTS):
            driver.add(f"{slot} {number}", prompt, GREEDY, lora_name=name)
    mixed = driver.run(NUM_TOKENS)
    for slot, outputs in enumerate(expected):
        assert [mixed[f"{slot} {number}"] for number in range(len(PROMPTS))] == outputs


@pytest.mark.parametrize("target", ["experts.2.up_proj", "lm_head", "embed_tokens"])
def test_an_adapter_of_what_is_no_linear_layer_of_all_tokens_is_refused(target: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    runner, path = make_runner(base), write_adapter(tmp_path / "a", base, (target,), 1)
    with pytest.raises(AdapterError, match="which is no linear layer or embedding of this model"):
        runner.read_adapter(identity_of(path), str(path))
