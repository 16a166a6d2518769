"""Models of several files: all parts and no others, each where its name and its metadata say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from llmstack_gguf import GGUFError, model_folder, read_model, split_names
from llmstack_gguf.split import model_files

NAMES = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_part(path: Path, number: int, *tensors: str, count: int = 3, total: int = 3) -> Path:
    """A part whose tensors are 32 bytes each."""
    keys = {"split.no": number, "split.count": count, "split.tensors.count": total}
    content = b"".join(text(key) + struct.pack("<II", 4, value) for key, value in keys.items())
    for place, name in enumerate(tensors):
        content += text(name) + struct.pack("<IQIQ", 1, 8, 0, 32 * place)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + content
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(32 * len(tensors)))
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [write_part(tmp_path / name, number, f"tensor {number}") for number, name in enumerate(NAMES)]


def test_names_of_parts_name_all_parts() -> None:
    assert split_names("folder/model-00002-of-00003.gguf") == [f"folder/{name}" for name in NAMES]
    for alone in ("model.gguf", "model-00004-of-00003.gguf", "model-00000-of-00003.gguf", "m-00001-of-99999.gguf"):
        assert split_names(alone) == [alone]


def test_parts_have_one_header(parts: list[Path]) -> None:
    assert model_files(parts[1]) == parts
    header = read_model(parts)
    assert [(name, info.file) for name, info in header.tensors.items()] == [
        (f"tensor {part}", part) for part in range(3)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: write_part(parts[1], 2, "tensor 1"), "00002-of-00003.gguf does not say that it is part 2 of 3"),
        (
            lambda parts: write_part(parts[2], 2, "x", count=4),
            "00003-of-00003.gguf does not say that it is part 3 of 3",
        ),
        (lambda parts: write_part(parts[2], 2, "tensor 0"), "the tensor 'tensor 0' is in another part too"),
        (lambda parts: write_part(parts[2], 2, "x", "y"), "have not the 3 tensors it says"),
        (lambda parts: write_part(parts[0], 1, "tensor 0"), "is not the first part"),
        (lambda parts: write_part(parts[0], 0, "tensor 0", count=2), "is one of 2 files, and 3 is what its name says"),
        (lambda parts: parts[1].write_bytes(b"GGUF" + bytes(8)), "00002-of-00003.gguf is no GGUF file"),
    ],
)
def test_files_that_are_not_the_parts_of_one_model_are_refused(parts: list[Path], change, message: str) -> None:  # type: ignore[no-untyped-def]
    change(parts)
    with pytest.raises(GGUFError, match=message):
        read_model(parts)


def test_a_missing_part_and_a_part_under_another_name_are_refused(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(parts[0].parent / "cache"))
    alone = parts[0].with_name("alone.gguf")
    alone.write_bytes(parts[0].read_bytes())
    with pytest.raises(GGUFError, match=r"alone\.gguf is one of 3 files, and 1 is what its name says; names of parts"):
        model_folder(alone)
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"is one of 3 files, and model-00002-of-00003\.gguf is not beside it"):
        model_folder(parts[2])
