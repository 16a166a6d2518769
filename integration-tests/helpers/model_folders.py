"""The folder of a small model, which the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def model_folder(*saves: Callable[[Path], object]) -> Any:
    """The fixture `folder` of a module: a folder that each of `saves` writes into, in order."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path: Path = tmp_path_factory.mktemp("made") / "model"
        for save in saves:
            save(path)
        return path

    return folder
