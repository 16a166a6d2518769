"""Small quantized checkpoints of every format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model_runner_helpers.gguf_models import write_model
from model_runner_helpers.quantized_layers import CASES, Draws
from safetensors.torch import save_file

from llmstack_model_files import resolve_model
from llmstack_model_runner.layers.weight_slot import WeightKind
from llmstack_model_runner.models import load_model_class
from parallel_helpers.families import FAMILIES

EXPERTS_IN_MXFP4 = "gpt-oss"
GGUF = {"gguf": "llama"} | {f"gguf of {name}": name for name in ("gpt-oss", "falcon-40b", "gptneox", "bloom")}
"""Models in several files."""


def _type_of(name: str) -> str:
    return "MXFP4" if "_exps" in name else "Q6_K" if "down" in name else "Q4_K"


def write_checkpoint(folder: Path, case: str) -> Path:
    """A random model whose linear layers have the format of the case."""
    if case in GGUF:
        write_model(folder / "model.gguf", GGUF[case], _type_of, tensors_per_file=9)
        return resolve_model(str(min(folder.glob("*.gguf"))))
    is_stacked = case == EXPERTS_IN_MXFP4
    architecture, config = FAMILIES["gpt oss" if is_stacked else "llama"]
    config = config | ({"intermediate_size": 64} if is_stacked else {"hidden_size": 128, "intermediate_size": 128})
    fields, make = CASES["mxfp4" if is_stacked else case]
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    model = load_model_class(architecture)(config, torch.float32, torch.device("cpu"))
    for seed, (name, slot) in enumerate(model.slots().items()):
        is_expert = len(slot.shape) == 3
        if slot.load_stored is None or name == "lm_head.weight" or is_expert != is_stacked:
            values = torch.randn(slot.shape, generator=generator) * 0.25
            tensors[name] = values + 1 if slot.kind is WeightKind.SCALE else values
        elif is_expert:
            count, num_inputs, num_outputs = slot.shape
            blocks = torch.randint(0, 256, (count, num_outputs, num_inputs // 32, 16), generator=generator)
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
            exponents = torch.randint(121, 126, (count, num_outputs, num_inputs // 32), generator=generator)
            tensors[f"{name}_scales"] = exponents.to(torch.uint8)
        else:
            num_outputs, num_inputs = slot.stored_shape or slot.shape
            made, _ = make(Draws(num_outputs, num_inputs, seed))
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in made.items()}
    values = {"architectures": [architecture], **config, "quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
