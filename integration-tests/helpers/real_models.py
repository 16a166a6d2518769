"""Trained models for tests: of an installed package, or of the wheels that `tools/fetch_model.py` keeps."""

from __future__ import annotations

import importlib.metadata
import os
import zipfile
from pathlib import Path

import pytest
from tool_modules import load_tool


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips the test where it is not available."""
    return _model_file("smollm2")


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2; skips the test where it is not available."""
    return _model_file("minilm").parent


def _model_file(name: str) -> Path:
    tool = load_tool("fetch_model")
    pin = tool.PINS[name]
    try:
        distribution = importlib.metadata.distribution(pin.distribution)
        installed = Path(str(distribution.locate_file(pin.file)))
        if distribution.version == pin.version and installed.is_file():
            return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    wheel = tool.cache_folder() / pin.wheel
    if not wheel.is_file():
        pytest.skip(f"needs {pin.distribution} {pin.version}: python tools/fetch_model.py {name}")
    return _unpacked(wheel, pin.file)


def _unpacked(wheel: Path, file: str) -> Path:
    """The file beside all others of its wheel, in a folder beside the wheel that is made once."""
    folder = wheel.with_suffix("")
    if not folder.is_dir():
        partial = folder.with_name(f"partial-{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process of the tests was first
            if not folder.is_dir():
                raise
    return folder / file
