"""Published quantized forms of models with pictures: text layers as stored, and a tower that is as it was trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from model_runner_helpers.picture_families import FAMILIES, PictureFamily
from model_runner_helpers.picture_prompts import (
    expected,
    generate,
    load_model,
    load_runner,
    logits_in_chunks,
    prompt_of,
    vectors_of,
)
from model_runner_helpers.quantized_layers import TOKENS, Draws, awq, compressed, naive_int8, packed_integers
from safetensors.torch import load_file, save_file

from llmstack_model_runner.preflight import find_problems
from llmstack_types import ModelRunnerConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TOWER = [
    *(f"visual.blocks.{number}.{name}" for number in range(3)
      for name in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    "visual.merger.mlp.0", "visual.merger.mlp.2",
]  # fmt: skip
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMS: Mapping[str, tuple[dict[str, Any], Callable[[Draws], Any]]] = {
    "awq": ({**_AWQ, "modules_to_not_convert": ["visual"]}, awq(32)),
    "compressed w4a16": (
        compressed("pack-quantized", 4, "group", group_size=32) | {"ignore": [*_TOWER, "lm_head"]},
        packed_integers(4, 32),
    ),
    "compressed w8a8": (
        compressed("int-quantized", 8, "channel", TOKENS) | {"ignore": ["re:visual.*", "lm_head"]},
        naive_int8,
    ),
}
EACH = [name if name == "awq" else pytest.param(name, marks=pytest.mark.full) for name in FORMS]


def wider() -> PictureFamily:
    """Qwen2.5-VL with layers that groups of 32 inputs divide."""
    family = FAMILIES["qwen 2.5 vl"]
    config = {**family.config, "hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.1}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 2, 4]}
    config["vision_config"] = {**config["vision_config"], "out_hidden_size": 64}
    return replace(family, config=config)


def write(folder: Path, family: PictureFamily, form: str) -> Any:
    """Writes the checkpoint in the form of the hub; transformers' model of the weights that it means."""
    reference = family.write(folder)
    fields, make = FORMS[form]
    given = load_file(folder / "model.safetensors")
    meant = dict(reference.named_parameters())
    for seed, name in enumerate([*given]):
        module = name.removesuffix(".weight")
        if not name.startswith("model.layers.") or not module.endswith(_LAYERS):
            continue
        tensors, weight = make(Draws(*given.pop(name).shape, seed))
        given |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        with torch.no_grad():
            meant[name.replace("model.", "model.language_model.", 1)].copy_(torch.from_numpy(weight))
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fields}))
    return reference


@pytest.mark.parametrize("form", EACH)
def test_a_published_form_computes_with_the_weights_that_it_means(form: str, tmp_path: Path) -> None:
    family = wider()
    reference = write(tmp_path / form, family, form)
    plain = tmp_path / "plain"
    family.write(plain)
    assert find_problems(ModelRunnerConfig(str(tmp_path / form), max_model_len=512)) == []
    prompt = prompt_of(family, (0, 1))
    outputs, logits = expected(reference, prompt)
    model = load_model(tmp_path / form)
    for size in (1000, 23, 7):
        found = logits_in_chunks(model, prompt.tokens + outputs[:-1], prompt.items, size)
        assert (found - logits).abs().max() <= 2e-5 * max(1.0, float(logits.abs().max()))
    for item in prompt.items:
        assert torch.equal(vectors_of(model, item), vectors_of(load_model(plain), item))
    assert generate(load_runner(tmp_path / form), prompt, 23) == outputs
