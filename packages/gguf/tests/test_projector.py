"""Encoders of pictures in files of their own: what they describe beside a text model, and what is refused."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest

from llmstack_gguf import GGUFError, Header, TensorInfo, TensorType, folder, picture_folder, picture_tensors
from llmstack_gguf.projector import picture_files

F32 = TensorType("F32", 1, 4)
METADATA: dict[str, Any] = {
    "general.architecture": "clip",
    "clip.has_vision_encoder": True,
    "clip.projector_type": "idefics3",
    "clip.vision.image_size": 64,
    "clip.vision.patch_size": 8,
    "clip.vision.embedding_length": 24,
    "clip.vision.block_count": 2,
    "clip.vision.attention.head_count": 3,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.projector.scale_factor": 2,
    "clip.vision.preproc_image_size": 128,
    "clip.vision.image_mean": array("f", [0.5] * 3),
    "clip.vision.image_std": array("f", [0.5] * 3),
}
SHAPES: dict[str, tuple[int, ...]] = {"v.blk.0.ffn_up.weight": (40, 24), "mm.model.fc.weight": (32, 96)}
TEXT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "dtype": "float32",
    "quantization_config": {"quant_method": "gguf"}, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip


def header(changes: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None) -> Header:
    values = {key: value for key, value in (METADATA | (changes or {})).items() if value is not None}
    found = {name: shape for name, shape in (SHAPES | (shapes or {})).items() if shape is not None}
    return Header(values, {name: TensorInfo(shape, F32, 0, 4 * math.prod(shape)) for name, shape in found.items()})


def test_two_files_describe_one_model() -> None:
    files = picture_files(header(), TEXT)
    config = files["config.json"]
    assert config["architectures"] == ["Idefics3ForConditionalGeneration"]
    assert config["text_config"] == {"model_type": "llama", "hidden_size": 32}
    assert (config["dtype"], config["eos_token_id"], config["scale_factor"]) == ("float32", 2, 2)
    assert config["vision_config"]["intermediate_size"] == 40
    assert files["preprocessor_config.json"]["size"] == {"longest_edge": 128}
    assert files["preprocessor_config.json"]["do_image_splitting"] is True
    assert files["processor_config.json"] == {"image_seq_len": 16}
    whole = picture_files(header({"clip.vision.preproc_image_size": None}), TEXT)
    assert whole["preprocessor_config.json"]["do_image_splitting"] is False


@pytest.mark.parametrize(("changes", "shapes", "message"), [
    ({"general.architecture": "llama"}, {}, "it has no encoder of pictures"),
    ({"clip.has_vision_encoder": False}, {}, "it has no encoder of pictures"),
    ({"clip.projector_type": "ldp"}, {}, "the projector 'ldp' is not supported; gemma3, idefics3"),
    ({"clip.projector_type": 7}, {}, "the projector '7' is not supported"),
    ({"clip.projector_type": "gemma3"}, {}, "of the type gemma3_text, and that of the other file is llama"),
    ({}, {"mm.model.fc.weight": (16, 96)}, "its vectors have 16 numbers, and those of the text model 32"),
    ({}, {"mm.model.fc.weight": None}, "it has no tensor mm.model.fc.weight of 2 dimensions"),
    ({}, {"mm.model.fc.weight": (32,)}, "it has no tensor mm.model.fc.weight of 2 dimensions"),
    ({}, {"v.blk.0.ffn_up.weight": None}, "it has no tensor v.blk.0.ffn_up.weight"),
    ({"clip.vision.block_count": 0}, {}, "clip.vision.block_count is missing or no count"),
    ({"clip.vision.block_count": 1 << 40}, {}, "its sizes are no encoder's"),
    ({"clip.vision.image_size": 1 << 40}, {}, "its sizes are no encoder's"),
    ({"clip.vision.attention.head_count": 5}, {}, "its sizes are no encoder's"),
    ({"clip.vision.patch_size": 0}, {}, "clip.vision.patch_size is missing or no count"),
    ({"clip.vision.projector.scale_factor": 0}, {}, "scale_factor fits no picture"),
    ({"clip.vision.image_mean": None}, {}, "clip.vision.image_mean is missing or not three numbers"),
    ({"clip.vision.image_std": array("f", [0.5, math.nan, 0.5])}, {}, "clip.vision.image_std is missing or not three"),
    ({"clip.projector_type": "mlp", "clip.vision.image_grid_pinpoints": array("I", [1])}, {"mm.2.weight": (32, 24)},
     "tiles of a picture"),
    ({"clip.projector_type": "mlp"}, {"mm.2.weight": (32, 24)}, "an encoder without a class token"),
])  # fmt: skip
def test_what_no_model_has_is_refused(changes: dict[str, Any], shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        picture_files(header(changes, shapes), TEXT)


def test_qwen_needs_the_axes_of_its_text_model() -> None:
    changes = {"clip.projector_type": "qwen2vl_merger"}
    found = header(changes, {"mm.2.weight": (32, 96)})
    text = TEXT | {"model_type": "qwen2"}
    with pytest.raises(GGUFError, match="how three axes share its rotary embedding"):
        picture_files(found, text)
    scaling = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    files = picture_files(found, text | {"rope_scaling": scaling})
    assert files["config.json"]["text_config"] == {"model_type": "qwen2_vl_text", "hidden_size": 32,
                                                   "rope_scaling": scaling}  # fmt: skip
    options = files["preprocessor_config.json"]
    assert (options["min_pixels"], options["max_pixels"]) == (8 * 16**2, 4096 * 16**2)


def test_parts_of_a_tensor_must_all_be_there() -> None:
    shapes = {"v.blk.1.attn_q.weight": (24, 24), "v.blk.1.attn_k.weight": (24, 24)}
    kind = {"clip.projector_type": "qwen2vl_merger"}
    with pytest.raises(GGUFError, match=r"layer 1 has not all of v.blk.1.attn_q.weight, v.blk.1.attn_k.weight"):
        list(picture_tensors(header(kind, shapes)))
    with pytest.raises(GGUFError, match=r"it has no tensor v.patch_embd.weight.1"):
        list(picture_tensors(header(kind, {"v.patch_embd.weight": (24, 3, 8, 8)})))


def test_names_are_those_of_repositories_and_unknown_ones_are_kept() -> None:
    shapes = {"v.blk.1.ffn_up.weight": (24, 40), "v.blk.1.ffn_down.weight": (40, 24), "v.blk.1.ffn_up.bias": (24,),
              "v.blk.1.other.weight": (1,), "v.blk.x.ln1.weight": (1,), "mm.more": (1,)}  # fmt: skip
    found = {tensor.sources[0]: tensor.name for tensor in picture_tensors(header({}, shapes))}
    assert found["v.blk.0.ffn_up.weight"] == "model.vision_model.encoder.layers.0.mlp.fc1.weight"
    # The first files of LLaVA have the two the other way around.
    assert found["v.blk.1.ffn_up.weight"] == "model.vision_model.encoder.layers.1.mlp.fc2.weight"
    assert found["v.blk.1.ffn_up.bias"] == "model.vision_model.encoder.layers.1.mlp.fc2.bias"
    for name in ("v.blk.1.other.weight", "v.blk.x.ln1.weight", "mm.more"):
        assert found[name] == name


def test_the_folder_of_both_files_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "read_header", lambda path: header())
    text = tmp_path / "cache" / "llmstack" / "gguf" / "text"
    text.mkdir(mode=0o700, parents=True)
    (text / "config.json").write_text(json.dumps(TEXT))
    (text / "tokenizer.json").write_text("{}")
    for name in ("text.gguf", "mmproj.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (text / folder.LINK_NAME).symlink_to(tmp_path / "text.gguf")
    made = picture_folder(text, tmp_path / "mmproj.gguf")
    assert made != text
    assert made == picture_folder(text, tmp_path / "mmproj.gguf") == picture_folder(made, tmp_path / "mmproj.gguf")
    assert folder.gguf_files(made) == [tmp_path / "text.gguf", tmp_path / "mmproj.gguf"]
    assert folder.gguf_files(text) == [tmp_path / "text.gguf"]
    assert {one.name for one in made.glob("*.json")} == {
        "config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    }  # fmt: skip
