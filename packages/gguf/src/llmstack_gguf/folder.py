"""Model folder of a GGUF file.

It has the small files that a repository of Hugging Face would have, and a link to each file of the model. Folders are
kept in the user's cache, so that a tokenizer is converted once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmstack_gguf.architecture import ROPE_TENSORS, generation_config, model_config
from llmstack_gguf.header import GGUFError, Header, read_header
from llmstack_gguf.projector import picture_files
from llmstack_gguf.split import model_files, read_model
from llmstack_gguf.tokenizer import tokenizer_files

logger = logging.getLogger(__name__)

LINK_NAME = "model.gguf"
_OTHER_LINKS = "model-part-{:05}.gguf"
PROJECTOR_LINK = "mmproj.gguf"
MAX_FOLDERS = 32
_MAX_ROPE_FACTORS = 4096
_NOTHING: Mapping[str, Any] = {}
_FORMAT = "5"
"""Is part of a folder's name, and changes when the conversion does."""


def cache_folder() -> Path:
    """The folder of model folders: `llmstack/gguf` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmstack" / "gguf"


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
    return _made("\0".join([_FORMAT, *map(_identity, files), *more]), contents, dict(zip(names, files, strict=True)))


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
    return _made("\0".join([folder.name, _identity(file)]), contents, {**links, PROJECTOR_LINK: file})


def _made(identity: str, contents: Callable[[], Mapping[str, Any]], links: Mapping[str, Path]) -> Path:
    """The folder of this identity; `contents` are those of its files, which are asked for unless it is there."""
    cache = _own_cache()
    folder = cache / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    if (folder / "config.json").is_file():
        os.utime(folder)
        return folder
    files = contents()
    made = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    try:
        for name, content in files.items():
            (made / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        for name, file in links.items():
            (made / name).symlink_to(file)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_oldest(cache)
    return folder


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that `model_folder` made, in order; none for any other folder.

    An encoder of pictures comes last.
    """
    real = Path(os.path.realpath(folder))
    link = real / LINK_NAME
    if real.parent != Path(os.path.realpath(cache_folder())) or not link.is_symlink():
        return []
    others = sorted(real.glob(_OTHER_LINKS.replace("{:05}", "*")))
    beside = [each for each in (real / PROJECTOR_LINK,) if each.is_symlink()]
    return [Path(os.path.realpath(each)) for each in (link, *others, *beside)]


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"


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


def _own_cache() -> Path:
    """The cache, which only its owner may write: a tokenizer decides what a prompt means."""
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise GGUFError(f"the cache {cache} belongs to another user, or others may write to it.")
    return cache


def _remove_oldest(cache: Path) -> None:
    """Keeps the folders that were used last."""
    folders = sorted(_made_folders(cache), key=lambda entry: entry[0], reverse=True)
    for _, folder in folders[MAX_FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _made_folders(cache: Path) -> Iterator[tuple[int, Path]]:
    for folder in cache.iterdir():
        try:
            if not folder.name.startswith("."):
                yield folder.stat().st_mtime_ns, folder
        except FileNotFoundError:  # removed by another process meanwhile
            continue
