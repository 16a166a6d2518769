"""A safetensors file is accepted only if every tensor lies whole and alone inside it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmstack_model_files import ModelFilesError, TensorInfo, check_safetensors, may_have_tensor
from llmstack_model_files.safetensors_header import MAX_TENSORS

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [26, 26]},
}


def write(path: Path, header: Any, data: bytes = bytes(26), *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_a_good_file_gives_types_shapes_and_places(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD)
    tensors = check_safetensors(path)
    start = path.stat().st_size - 26
    assert tensors == {
        "a": TensorInfo("F32", (2, 3), start, start + 24),
        "b": TensorInfo("BF16", (), start + 24, start + 26),
        "empty": TensorInfo("I64", (0, 7), start + 26, start + 26),
    }


def changed(name: str, **values: Any) -> dict[str, Any]:
    return GOOD | {name: GOOD[name] | values}


@pytest.mark.parametrize(
    "header",
    [
        changed("a", dtype="F33"),
        changed("a", dtype=["F32"]),
        changed("a", shape=[2, 4]),
        changed("a", shape=[-2, -3]),
        changed("a", shape=[2.0, 3]),
        changed("a", shape=[True, 6]),
        changed("a", shape="23"),
        changed("a", shape=[1] * 65 + [6]),
        changed("a", data_offsets=[0, 23]),
        changed("a", data_offsets=[24, 0]),
        changed("a", data_offsets=[0, 24, 26]),
        changed("a", data_offsets=[2, 26]),
        changed("a", data_offsets=[2**70, 2**70 + 24]),
        changed("b", data_offsets=[22, 24]),
        changed("b", shape=[2], data_offsets=[24, 28]),
        changed("a", extra=1),
        {"a": GOOD["a"]},
        {"a": [1]},
        GOOD | {"__metadata__": {"format": 1}},
        GOOD | {"__metadata__": []},
        b"",
        b"[]",
        b" {}",
        b'{"a": {"dtype": "F32"}}',
        b'{"a": 1, "a": 2}',
        b"{" * 100_000,
    ],
    ids=lambda header: str(header)[:60],
)
def test_contradictions_are_refused_in_one_line(tmp_path: Path, header: Any) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelFilesError, match=r"^[^\n]{1,300}$"):
        check_safetensors(path)


def test_too_many_tensors_are_refused_before_they_are_read(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = write(tmp_path / "model.safetensors", {str(number): entry for number in range(MAX_TENSORS + 1)})
    with pytest.raises(ModelFilesError, match=f"has more than {MAX_TENSORS} tensors"):
        check_safetensors(path)


@pytest.mark.parametrize("length", [0, 10**6, 2**63, 2**64 - 1])
def test_lengths_that_do_not_fit_are_refused_before_anything_is_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, length=length)
    with pytest.raises(ModelFilesError, match="damaged"):
        check_safetensors(path)


def test_truncated_and_lengthened_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", GOOD).read_bytes()
    for text in [*(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        path = tmp_path / "cut"
        path.write_bytes(text)
        with pytest.raises(ModelFilesError):
            check_safetensors(path)


def test_a_name_is_found_in_the_text_of_a_header(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [26], "data_offsets": [0, 26]}
    path = write(tmp_path / "m.safetensors", {"model.lm_head.weight": entry})
    assert may_have_tensor(path, ("wte.weight", "lm_head.weight"))
    assert not may_have_tensor(path, ("wte.weight", "lm_head", "head.weigh"))
    escaped = write(tmp_path / "e.safetensors", {"lm_h\u00e9ad.weight": entry})
    assert may_have_tensor(escaped, ("lm_head.weight",))
    with pytest.raises(ModelFilesError, match="its header of"):
        may_have_tensor(write(tmp_path / "l.safetensors", {"a": entry}, length=1 << 40), ("a",))


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="cannot be read"):
        check_safetensors(tmp_path / "nothing.safetensors")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "X"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@given(header=st.dictionaries(st.text(max_size=4), ENTRIES | JSON_VALUES, max_size=4), num_bytes=st.integers(0, 60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_either_refused_or_covers_the_file_exactly(
    tmp_path: Path, header: dict[str, Any], num_bytes: int
) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(num_bytes))
    try:
        tensors = check_safetensors(path)
    except ModelFilesError:
        return
    covered = sorted((info.start, info.end) for info in tensors.values() if info.end > info.start)
    size = path.stat().st_size
    assert sum(end - start for start, end in covered) == num_bytes
    assert all(size - num_bytes <= start < end <= size for start, end in covered)


@given(text=st.binary(max_size=200))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_and_nothing_else(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(text)
    with contextlib.suppress(ModelFilesError):
        assert check_safetensors(path) == {}
