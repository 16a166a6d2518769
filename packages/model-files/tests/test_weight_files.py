"""The files with a model's weights are found by name, by index, or not, and then the error says why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmstack_model_files import ModelFilesError, safetensors_files, weights_digest


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_single_file_wins(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "other.safetensors").touch()
    assert [path.name for path in safetensors_files(tmp_path)] == ["model.safetensors"]


def test_shards_come_in_the_order_of_their_names_and_once_each(tmp_path: Path) -> None:
    names = ["model-2.safetensors", "model-1.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    write_index(tmp_path, {"a": names[0], "b": names[1], "c": names[0]})
    assert [path.name for path in safetensors_files(tmp_path)] == sorted(names)


def test_a_file_of_another_name_serves_where_it_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").touch()
    assert [path.name for path in safetensors_files(tmp_path)] == ["weights.safetensors"]
    (tmp_path / "more.safetensors").touch()
    with pytest.raises(ModelFilesError, match="several"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "model-1.safetensors"}, "missing"),
        ({"a": "../model.safetensors"}, "not a name"),
        ({"a": "model.bin"}, "no safetensors file"),
        ({"a": 1}, "weight_map"),
        ([], "weight_map"),
        (None, "weight_map"),
        ({}, "no files"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: object, words: str) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelFilesError, match=words):
        safetensors_files(tmp_path)


def test_weights_that_could_run_code_are_named_as_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelFilesError, match=r"pytorch_model\.bin, a format that can run code"):
        safetensors_files(tmp_path)


def test_no_weights_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no safetensors weights"):
        safetensors_files(tmp_path)
    with pytest.raises(ModelFilesError, match="no folder"):
        safetensors_files(tmp_path / "nowhere")


def test_the_digest_of_weights_follows_size_time_and_header(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) == ""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"header and data")
    os.utime(path, ns=(1, 1))
    digests = [weights_digest(tmp_path), weights_digest(tmp_path)]
    assert digests[0] == digests[1]
    os.utime(path, ns=(1, 2))
    digests.append(weights_digest(tmp_path))
    path.write_bytes(b"HEADER and data")
    os.utime(path, ns=(1, 1))
    digests.append(weights_digest(tmp_path))
    path.write_bytes(b"header and data, and more")
    os.utime(path, ns=(1, 1))
    digests.append(weights_digest(tmp_path))
    assert len(set(digests)) == 4


def test_the_digest_follows_the_place_of_the_files_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    digests = []
    for name in ("first", "second"):
        made = tmp_path / name
        made.write_bytes(b"header and data")
        os.utime(made, ns=(1, 1))
        os.link(made, path)  # both inodes are in use
        digests.append([weights_digest(tmp_path), weights_digest(tmp_path, of_place=True)])
        path.unlink()
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_the_digest_of_content_is_that_of_every_byte_whatever_the_times(tmp_path: Path) -> None:
    assert weights_digest(tmp_path, of_content=True) == ""
    digests = []
    for name, time_ns, text in (("a", 1, b"weights"), ("b", 2, b"weights"), ("c", 1, b"weight5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        path = tmp_path / name / "model.safetensors"
        path.write_bytes(bytes(2**20) + text)
        os.utime(path, ns=(time_ns, time_ns))
        digests.append(weights_digest(tmp_path / name, of_content=True))
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "b" / "config.json").write_text('{"rope_theta": 5.0}')
    assert weights_digest(tmp_path / "b", of_content=True) != digests[0]
