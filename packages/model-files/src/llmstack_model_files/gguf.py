"""Models that are a GGUF file, or several, of a path, a folder or a repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmstack_model_files.folder import ModelFilesError

SUFFIX = ".gguf"
_QUANTIZATION = re.compile(r"[A-Za-z0-9_]{2,16}")
_NOTHING: Mapping[str, Any] = {}
_PROJECTOR = "mmproj"  # in names of files that belong to a model of images


def open_gguf(path: Path, generation: Mapping[str, Any] = _NOTHING) -> Path:
    """The model folder that stands for a GGUF file.

    `generation`: Entries of `generation_config.json` that the file itself does not have.

    Raises:
        ModelFilesError: The file cannot be read, or it or its model is not supported.
    """
    from llmstack_gguf import GGUFError, model_folder  # late: most models are folders

    try:
        return model_folder(path, generation)
    except GGUFError as error:
        raise ModelFilesError(str(error)) from error
    except OSError as error:
        raise ModelFilesError(f"{path.name} cannot be opened: {error.strerror} ({error.filename}).") from error


def with_projector(folder: Path, projector: str) -> Path:
    """The folder of a model of GGUF files with an encoder of pictures in another one, llama.cpp's `mmproj`.

    `folder`: What `open_gguf` returned for the text model.

    Raises:
        ModelFilesError: One of the two is no such file, or the encoder is not supported or of another model.
    """
    from llmstack_gguf import GGUFError, picture_folder

    file = Path(projector).expanduser()
    if not gguf_weights(folder):
        raise ModelFilesError(f"{file.name[:128]} belongs to a text model in a GGUF file, and {folder} is none.")
    if not file.is_file():
        raise ModelFilesError(f"There is no file {projector[:256]}.")
    try:
        return picture_folder(folder, file)
    except GGUFError as error:
        raise ModelFilesError(str(error)) from error
    except OSError as error:
        raise ModelFilesError(f"{file.name} cannot be opened: {error.strerror} ({error.filename}).") from error


def gguf_weights(folder: Path) -> list[Path]:
    """The GGUF files of a folder that `open_gguf` returned, in order; none for a folder with weights of its own.

    An encoder of pictures comes last.

    Raises:
        ModelFilesError: A file is gone.
    """
    from llmstack_gguf import gguf_files

    paths = gguf_files(folder)
    for path in paths:
        if not path.is_file():
            raise ModelFilesError(f"{path} is gone; the model was loaded from it.")
    return paths


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no `config.json`, the first of its parts; None where it has none.

    Raises:
        ModelFilesError: It has several models.
    """
    from llmstack_gguf import split_names

    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}") if _PROJECTOR not in path.name)
    if len(names) > 1 and names != split_names(names[0]):
        raise ModelFilesError(
            f"The folder {folder} has {len(names)} GGUF files; name one, such as {folder / names[0]}."
        )
    return folder / names[0] if names else None


def split_quantization(name: str) -> tuple[str, str]:
    """The two parts of `repository:quantization`; the second is empty for any other name."""
    repository, _, quantization = name.partition(":")
    return (repository, quantization) if _QUANTIZATION.fullmatch(quantization) else (name, "")


def choose_files(names: Iterable[str], quantization: str, repository: str) -> list[str]:
    """The GGUF file of a quantization, or all parts of it, of all file names of a repository.

    Raises:
        ModelFilesError: There is none, a part is missing, or there are several models.
    """
    from llmstack_gguf import split_names

    files = [name for name in names if name.endswith(SUFFIX) and _PROJECTOR not in name]
    word = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?:[-./]|$)", re.IGNORECASE)
    found = sorted(name for name in files if word.search(name.removesuffix(SUFFIX)))
    if found and found == split_names(found[0]):
        return found
    if found:
        raise ModelFilesError(
            f"{repository} has {quantization} in {len(found)} files, which are not all parts of one model."
        )
    listed = ", ".join(sorted(files)[:8]) or "none"
    raise ModelFilesError(f"{repository} has no GGUF file of {quantization}; its GGUF files: {listed}.")
