"""The model folder is complete, small, and its weights are what its config says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from math import prod
from pathlib import Path
from typing import Any

import pytest

from llmstack_demo_model import MODEL_NAME, model_path

FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MAX_WEIGHT_BYTES = 12_000_000


def read_json(name: str) -> Any:
    return json.loads((model_path() / name).read_text(encoding="utf-8"))


def weights_header() -> tuple[dict[str, Any], int]:
    """Return the header of the weights and the number of bytes that follow it."""
    data = (model_path() / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, len(data) - 8 - size


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    width = config["n_embd"]
    shapes = {
        "transformer.wte.weight": [config["vocab_size"], width],
        "transformer.wpe.weight": [config["n_positions"], width],
        "transformer.ln_f.weight": [width],
        "transformer.ln_f.bias": [width],
    }
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}.{norm}.weight": [width], f"{block}.{norm}.bias": [width]}
        for name, fan_in, fan_out in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"{block}.{name}.weight": [fan_in, fan_out], f"{block}.{name}.bias": [fan_out]}
    return shapes


def test_the_folder_holds_every_file_a_server_needs() -> None:
    assert sorted(path.name for path in model_path().iterdir()) == sorted(FILES)


def test_the_name_and_the_path_are_plain_values() -> None:
    assert MODEL_NAME == "llmstack-demo"
    assert isinstance(model_path(), Path)
    assert model_path().is_absolute()


def test_the_weights_are_at_most_twelve_megabytes() -> None:
    assert (model_path() / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES


def test_the_header_names_exactly_the_tensors_of_the_configured_gpt2() -> None:
    header, _ = weights_header()
    assert {name: entry["shape"] for name, entry in header.items()} == expected_shapes(read_json("config.json"))


def test_every_tensor_has_the_configured_dtype() -> None:
    header, _ = weights_header()
    config = read_json("config.json")
    name = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[config["dtype"]]
    assert config["torch_dtype"] == config["dtype"]
    assert {entry["dtype"] for entry in header.values()} == {name}


def test_the_tensors_fill_the_file_without_gaps() -> None:
    header, num_bytes = weights_header()
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end
        assert stop - start == prod(entry["shape"]) * (4 if entry["dtype"] == "F32" else 2)
        end = stop
    assert end == num_bytes


def test_the_configs_agree_on_the_end_token() -> None:
    ids = {entry["content"]: entry["id"] for entry in read_json("tokenizer.json")["added_tokens"]}
    end = ids[read_json("tokenizer_config.json")["eos_token"]]
    assert read_json("config.json")["eos_token_id"] == end
    assert read_json("generation_config.json")["eos_token_id"] == end


def test_the_tokenizer_fills_the_embedding() -> None:
    tokenizer = read_json("tokenizer.json")
    assert len(tokenizer["model"]["vocab"]) == read_json("config.json")["vocab_size"]
    assert read_json("tokenizer_config.json")["model_max_length"] == read_json("config.json")["n_positions"]


def test_the_entry_point_loads_the_path_function() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    value = "llmstack_demo_model:model_path"
    assert f'demo = "{value}"' in project
    assert EntryPoint("demo", value, "llmstack.models").load()() == model_path()


@pytest.mark.parametrize("module", ["torch", "transformers", "tokenizers", "safetensors", "numpy"])
def test_importing_the_package_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, llmstack_demo_model as m; m.model_path(); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
