"""Model folder of a GGUF file.

It has the small files that a repository of Hugging Face would have, and a link to each file of the model. Folders are
kept in the user's cache, so that a tokenizer is converted once.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmstack_gguf.architecture import ROPE_TENSORS, generation_config, model_config
from llmstack_gguf.header import GGUFError, Header, read_header
from llmstack_gguf.made_folders import cache_of, file_identity, is_made_folder, made_folder
from llmstack_gguf.projector import picture_files
from llmstack_gguf.split import model_files, read_model
from llmstack_gguf.tokenizer import tokenizer_files

logger = logging.getLogger(__name__)

_KIND = "gguf"
LINK_NAME = "model.gguf"
_OTHER_LINKS = "model-part-{:05}.gguf"
PROJECTOR_LINK = "mmproj.gguf"
_MAX_ROPE_FACTORS = 4096
_NOTHING: Mapping[str, Any] = {}
_FORMAT = "6"
"""Is part of a folder's name, and changes when the conversion does."""


def cache_folder() -> Path:
    """The folder of model folders: `llmstack/gguf` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return cache_of(_KIND)


def model_folder(path: Path, generation: Mapping[str, Any] = _NOTHING) -> Path:
    """The model folder of a GGUF file, or of all files that one belongs to; made unless it is in the cache.

    `generation`: Entries of `generation_config.json` that the file itself does not have.

    Raises:
        GGUFError: The file or its model is not supported, a part is missing, or others may write to the cache.
        OSError: The file cannot be read, or the cache not written.
    """
    files = [Path(os.path.realpath(part)) for part in model_files(path)]  # links of the hub's cache lose their names
    more = [json.dumps(generation, sort_keys=True)] if generation else []

    def contents() -> dict[str, Any]:
        header = read_model(files)
        found = _contents(files, header)
        return found | {"generation_config.json": {**generation, **found["generation_config.json"]}}

    names = (_OTHER_LINKS.format(number + 1) if number else LINK_NAME for number in range(len(files)))
    identity = "\0".join([_FORMAT, *map(file_identity, files), *more])
    return made_folder(_KIND, identity, contents, dict(zip(names, files, strict=True)))


def picture_folder(folder: Path, projector: Path) -> Path:
    """The model folder of a text model and an encoder of pictures for it; made unless it is in the cache.

    `folder`: What `model_folder` returned for the text model. A folder with this encoder is returned as it is.

    Raises:
        GGUFError: The encoder is not supported, or belongs to another model.
        OSError: The file cannot be read, or the cache not written.
    """
    file = Path(os.path.realpath(projector))
    own = folder / PROJECTOR_LINK
    if own.is_symlink():
        if Path(os.path.realpath(own)) != file:
            raise GGUFError(f"{own.resolve().name} is the encoder of this model, and {projector.name} another one.")
        return folder

    def contents() -> dict[str, Any]:
        found = {one.name: json.loads(one.read_text(encoding="utf-8")) for one in folder.glob("*.json")}
        return found | _picture_contents(file, found["config.json"])

    links = {one.name: Path(os.path.realpath(one)) for one in folder.iterdir() if one.is_symlink()}
    identity = "\0".join([folder.name, file_identity(file)])
    return made_folder(_KIND, identity, contents, {**links, PROJECTOR_LINK: file})


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that `model_folder` made, in order; none for any other folder.

    An encoder of pictures comes last.
    """
    real = Path(os.path.realpath(folder))
    link = real / LINK_NAME
    if not is_made_folder(folder, _KIND) or not link.is_symlink():
        return []
    others = sorted(real.glob(_OTHER_LINKS.replace("{:05}", "*")))
    beside = [each for each in (real / PROJECTOR_LINK,) if each.is_symlink()]
    return [Path(os.path.realpath(each)) for each in (link, *others, *beside)]


def _contents(files: Sequence[Path], header: Header) -> dict[str, Any]:
    file = files[0]
    try:
        contents = {
            "config.json": model_config(header, _rope_factors(files, header)),
            "generation_config.json": generation_config(header),
        }
    except GGUFError as error:
        raise GGUFError(f"{file.name} is not supported: {error}") from None
    try:
        contents |= tokenizer_files(header.metadata)
    except GGUFError as error:  # with a tokenizer of another folder, the model runs
        logger.warning("%s: %s Name a folder with the model's tokenizer (--tokenizer).", file.name, error)
    return contents


def _picture_contents(file: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return picture_files(read_header(file), text)
    except GGUFError as error:
        raise GGUFError(f"{file.name} is not supported beside this text model: {error}") from None


def _rope_factors(files: Sequence[Path], header: Header) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in ROPE_TENSORS:
        info = header.tensors.get(name)
        if info is None:
            continue
        if info.type.name != "F32" or info.num_bytes > 4 * _MAX_ROPE_FACTORS:
            raise GGUFError(f"{name} is no list of float32 numbers.")
        with files[info.file].open("rb") as data:
            data.seek(info.start)
            found[name] = list(struct.unpack(f"<{info.num_bytes // 4}f", data.read(info.num_bytes)))
    return found
