"""The model folder is complete and small, and its weights are what its config says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from llmstack_demo_vision import MODEL_NAME, model_path

FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
    "processor_config.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
MAX_BYTES = 18_000_000


def read_json(name: str) -> Any:
    return json.loads((model_path() / name).read_text(encoding="utf-8"))


def test_the_folder_is_complete_and_has_at_most_eighteen_megabytes() -> None:
    assert {path.name for path in model_path().iterdir()} == FILES
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= MAX_BYTES


def test_the_weights_are_those_of_the_configuration_in_its_type() -> None:
    data = (model_path() / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(data) - 8 - size
    config = read_json("config.json")
    text, vision = config["text_config"], config["vision_config"]
    assert config["dtype"] == "bfloat16"
    joined = vision["hidden_size"] * config["scale_factor"] ** 2
    shapes = {
        "model.text_model.embed_tokens.weight": [text["vocab_size"], text["hidden_size"]],
        "model.connector.modality_projection.proj.weight": [text["hidden_size"], joined],
        "model.vision_model.embeddings.patch_embedding.weight": [vision["hidden_size"], 3, *[vision["patch_size"]] * 2],
    }
    assert {name: header[name]["shape"] for name in shapes} == shapes
    for part, sizes in (("text_model.layers", text), ("vision_model.encoder.layers", vision)):
        numbers = {int(name.split(f"{part}.")[1].split(".")[0]) for name in header if f".{part}." in name}
        assert numbers == set(range(sizes["num_hidden_layers"]))


def test_tokens_and_pictures_fit_the_configuration() -> None:
    config, tokenizer = read_json("config.json"), read_json("tokenizer.json")
    ids = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    assert len(tokenizer["model"]["vocab"]) == config["text_config"]["vocab_size"]
    assert ids["<image>"] == config["image_token_id"]
    assert ids[read_json("tokenizer_config.json")["eos_token"]] == config["eos_token_id"]
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"] // config["scale_factor"]
    assert read_json("processor_config.json")["image_seq_len"] == side**2


def test_the_entry_point_has_the_name_of_the_model() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    value = "llmstack_demo_vision:model_path"
    assert f'{MODEL_NAME} = "{value}"' in project
    assert EntryPoint(MODEL_NAME, value, "llmstack.models").load()() == model_path()


@pytest.mark.parametrize("module", ["torch", "transformers", "tokenizers", "safetensors", "numpy", "PIL"])
def test_importing_the_package_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, llmstack_demo_vision as m; m.model_path(); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
