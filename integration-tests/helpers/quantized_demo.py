"""The demo model with quantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llmstack_demo_model import model_path


def write_quantized_demo(folder: Path) -> Path:
    """The demo model as a checkpoint of compressed-tensors, with linear layers of 8 bits."""
    shutil.copytree(model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and ".h." in name:  # of GPT-2, which stores the transpose
            weight = tensors.pop(name).t().float()
            scales = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scales).round().to(torch.int8).contiguous()
            tensors[f"{name}_scale"] = scales
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    group = {"targets": ["Conv1D"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": group}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder
