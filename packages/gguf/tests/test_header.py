"""Headers are read as the format's own library writes them, and nothing in a file is believed unchecked."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_gguf import GGUFError, read_header


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: bytes = bytes(64), version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


GOOD = file_of(
    [
        key("general.architecture", 8, text("llama")),
        key("a.number", 4, struct.pack("<I", 7)),
        key("a.flag", 7, b"\x01"),
        key("some.texts", 9, struct.pack("<IQ", 8, 2) + text("ä") + text("")),
        key("some.numbers", 9, struct.pack("<IQ2f", 6, 2, 0.5, -1.5)),
    ],
    [tensor("first"), tensor("second", (32, 1), 8, 32)],
    bytes(32 + 34),
)


def read(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return read_header(path)


def test_values_and_places_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    assert found.architecture == "llama"
    assert found.metadata["a.number"] == 7
    assert found.metadata["a.flag"] is True
    assert found.metadata["some.texts"] == ["ä", ""]
    assert list(found.metadata["some.numbers"]) == [0.5, -1.5]
    second = found.tensors["second"]
    assert (second.shape, second.type.name, second.num_bytes) == ((1, 32), "Q8_0", 34)
    assert second.start == found.tensors["first"].start + 32


def test_a_file_of_the_formats_library_is_read_as_it_was_written(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
    numpy = pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_context_length(512)
    writer.add_array("a.list", [1, 2, 3])
    values = numpy.arange(64, dtype=numpy.float32).reshape(2, 32)
    writer.add_tensor("plain", values)
    quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("few_bits", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(tmp_path / "model.gguf")
    assert found.metadata["qwen2.context_length"] == 512
    assert list(found.metadata["a.list"]) == [1, 2, 3]
    content = (tmp_path / "model.gguf").read_bytes()
    for name, expected in (("plain", values), ("few_bits", quantized)):
        info = found.tensors[name]
        assert info.shape == (2, 32)
        assert content[info.start : info.start + info.num_bytes] == expected.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "is no GGUF file"),
        (b"GGUF", "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "is a pointer of Git LFS and not the file itself"),
        (file_of([], [], version=1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors, more than 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "keys, more than 65536"),
        (file_of([text("x" * 300)], []), "300 bytes in a text, more than 256"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("a", 8, struct.pack("<Q", 1 << 19)), "ends inside its header"),
        (file_of([key("a", 8, text(b"\xff"))], []), "a text is no UTF-8"),
        (file_of([key("a", 13, bytes(8))], []), "no value of type 13"),
        (file_of([key("a", 9, struct.pack("<IQ", 9, 1))], []), "no array of values of type 9"),
        (file_of([key("a", 9, struct.pack("<IQ", 4, 1 << 30))], []), "entries in an array, more than"),
        (file_of([key("a", 7, b"\x01")] * 2, []), "the key 'a' is doubled"),
        (file_of([], [tensor("t"), tensor("t", offset=32)]), "the tensor 't' is doubled"),
        (file_of([], [tensor("t"), tensor("u")]), "'u' is not aligned, or overlaps"),
        (file_of([], [tensor("t", offset=8)]), "'t' is not aligned"),
        (file_of([], [tensor("t", (1 << 20,))]), "'t' goes beyond the end of the file"),
        (file_of([], [tensor("t", (1 << 41, 4))]), "'t' has an impossible shape"),
        (file_of([], [tensor("t", (0,))]), "'t' has an impossible shape"),
        (file_of([], [tensor("t", (1,) * 5)]), "'t' has 5 dimensions"),
        (file_of([], [tensor("t", kind=16)]), "'t' has the type IQ2_XXS; F32, F16"),
        (file_of([], [tensor("t", kind=2)]), "rows of 8 numbers, which are no blocks of Q4_0"),
        (file_of([key("general.alignment", 4, struct.pack("<I", 48))], [tensor("t")]), "no power of two"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_in_a_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(GGUFError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
    assert str(caught.value).startswith("model.gguf ")


@given(st.data())
def test_changed_or_cut_files_are_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)))])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 255)), max_size=4)):
        if place < len(content):
            content[place] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content)
    try:
        found = read_header(path)
    except GGUFError:
        return
    for info in found.tensors.values():
        assert 0 <= info.start <= info.start + info.num_bytes <= len(content)
