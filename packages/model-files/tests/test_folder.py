"""Files of a model folder are opened, and nothing outside it, and nothing that could run code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmstack_model_files import (
    ModelFilesError,
    adapter_digest,
    artifact_path,
    check_safetensors,
    open_artifact,
    overridden,
    read_adapter,
    read_json,
    read_json_array,
    read_model_config,
)
from llmstack_model_files import folder as folder_module


def test_a_file_is_opened_for_reading_bytes(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_bytes(b"a b")
    with open_artifact(tmp_path, "merges.txt") as file:
        assert file.read() == b"a b"


def test_a_missing_file_is_none_or_an_error_that_names_it(tmp_path: Path) -> None:
    assert artifact_path(tmp_path, "config.json") is None
    assert artifact_path(tmp_path / "nowhere", "config.json") is None
    assert read_json(tmp_path, "config.json", required=False) is None
    with pytest.raises(ModelFilesError, match=r"has no config\.json"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", "a/../../secret.json", "", "a\\b", "a\0b", ".."])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelFilesError, match="not a name of a file"):
        open_artifact(folder, name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "MODEL.CKPT", "a.pkl", "x.pth"])
def test_formats_that_can_run_code_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelFilesError, match="can run code"):
        open_artifact(tmp_path, name)


def test_links_out_of_the_folder_are_refused_and_links_within_it_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    (folder / "real.json").write_text('{"a": 1}')
    (folder / "alias.json").symlink_to("real.json")
    with pytest.raises(ModelFilesError, match="leads out"):
        read_json(folder, "config.json")
    assert read_json(folder, "alias.json") == {"a": 1}


def test_a_link_to_the_folder_itself_and_links_into_the_hubs_blobs_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--gpt2"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text('{"a": 2}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "other.json").symlink_to("../../refs/main")
    (tmp_path / "alias").symlink_to(snapshot)
    assert read_json(snapshot, "config.json") == {"a": 2}
    assert read_json(tmp_path / "alias", "config.json") == {"a": 2}
    with pytest.raises(ModelFilesError, match="leads out"):
        read_json(snapshot, "other.json")


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFilesError, match="plain file"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a": ' + b"9" * 5000 + b"}", b"[1]", b"[" * 100_000],
)
def test_json_that_is_wrong_is_one_line_of_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelFilesError, match=r"^config\.json [^\n]*\.$"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize("name", ["absent", "x" * 5000])
def test_a_path_that_is_no_folder_has_no_adapter(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFilesError, match=rf"^{name[:64]} is no folder of an adapter\.$"):
        adapter_digest(tmp_path / name, 1000)


@pytest.mark.parametrize("read", [adapter_digest, read_adapter])
def test_the_size_of_an_adapter_is_checked_before_it_is_read(
    tmp_path: Path, read: Callable[[Path, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.truncate(4 << 30)
    monkeypatch.setattr(hashlib, "sha256", lambda content: SimpleNamespace(update=pytest.fail))
    with pytest.raises(ModelFilesError, match=r"^adapter_model\.safetensors has more than 1073741824 bytes\.$"):
        read(tmp_path, 1 << 30)


def test_an_array_is_read_where_one_is_expected(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "Pooling"}, 1]')
    assert read_json_array(tmp_path, "modules.json") == [{"type": "Pooling"}, 1]
    assert read_json_array(tmp_path, "absent.json", required=False) is None
    with pytest.raises(ModelFilesError, match=r"has no absent\.json"):
        read_json_array(tmp_path, "absent.json")
    with pytest.raises(ModelFilesError, match="does not hold a JSON object"):
        read_json(tmp_path, "modules.json")
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="does not hold a JSON array"):
        read_json_array(tmp_path, "modules.json")


def test_json_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_JSON_BYTES", 100)
    (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 100}))
    with pytest.raises(ModelFilesError, match="larger"):
        read_json(tmp_path, "config.json")


def test_overrides_replace_values_and_merge_objects():
    config = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1]}
    overrides = {"a": None, "b": {"d": {"e": 4, "g": 5}}, "f": [2], "h": {"i": 6}}
    merged = {"a": None, "b": {"c": 2, "d": {"e": 4, "g": 5}}, "f": [2], "h": {"i": 6}}
    assert overridden(config, overrides) == merged
    assert config == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1]}


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 5.0}),
        ({"rope_scaling": {"type": "yarn", "factor": 4}},
         {"rope_type": "yarn", "type": "yarn", "factor": 4, "rope_theta": 1.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 7.0}},
         {"rope_type": "default", "rope_theta": 7.0}),
        ({"vocab_size": 3}, {"rope_type": "default", "rope_theta": 1.0}),
    ],
)  # fmt: skip
def test_older_names_of_a_rotary_embedding_override_a_newer_file(overrides: dict[str, Any], rope: dict[str, Any]):
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}
    assert overridden(config, overrides)["rope_parameters"] == rope
    assert "rope_parameters" not in overridden({"rope_theta": 1.0}, {"rope_theta": 5.0})


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"a": [0, {"__float__": "Infinity"}], "b": -Infinity, "c": {"__float__": 1}}'
    )
    assert read_json(tmp_path, "config.json") == {"a": [0, inf], "b": -inf, "c": {"__float__": 1}}


def test_a_pointer_of_git_lfs_is_called_that(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234567\n"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(pointer)
    with pytest.raises(ModelFilesError, match=r"^tokenizer\.json is a pointer of Git LFS"):
        open_artifact(tmp_path, "tokenizer.json")
    with pytest.raises(ModelFilesError, match=r"config\.json is a pointer of Git LFS"):
        read_json(tmp_path, "config.json")
    with pytest.raises(ModelFilesError, match=r"model\.safetensors is a pointer of Git LFS.* run git lfs pull"):
        check_safetensors(tmp_path / "model.safetensors")


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, {"quantize_config.json": GPTQ}, {"quant_method": "fp8"}),
        ({"compression_config": {"config_groups": {}}}, {"quantize_config.json": GPTQ}, None),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {}, {"quant_method": "fp8"}),
        ({"text_config": "none"}, {}, None),
        ({}, {"quantize_config.json": GPTQ}, {"quant_method": "gptq", **GPTQ}),
        ({}, {"quantize_config.json": {"quant_method": "awq", **GPTQ}}, {"quant_method": "awq", **GPTQ}),
        ({}, {"quantize_config.json": {"damp_percent": 0.1}}, None),
        ({}, {"quant_config.json": AWQ}, {"quant_method": "awq", **AWQ}),
    ],
)
def test_a_quantization_is_found_wherever_it_is_described(
    config: dict[str, Any], files: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    for name, content in (files | {"config.json": config}).items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_model_config(tmp_path, {}).get("quantization_config") == expected
