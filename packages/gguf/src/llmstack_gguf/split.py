"""Models that are split into several files, as `llama-gguf-split` names them.

The first file has the metadata of the model, and each has some of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmstack_gguf.header import MAX_TENSORS, GGUFError, Header, TensorInfo, read_header

MAX_FILES = 512
_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)")


def split_names(name: str) -> list[str]:
    """The names of all files of the model that `name` is a part of, in order; `name` alone where it says no part."""
    found = _NAME.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_FILES:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}{found['suffix']}" for number in range(1, count + 1)]


def model_files(path: Path) -> list[Path]:
    """The files of the model that a file belongs to, the first one first.

    Raises:
        GGUFError: One of them is missing.
    """
    paths = [path.with_name(name) for name in split_names(path.name)]
    missing = next((each.name for each in paths if not each.is_file()), None)
    if missing is not None:
        raise GGUFError(f"{path.name} is one of {len(paths)} files, and {missing} is not beside it.")
    return paths


def read_model(paths: Sequence[Path]) -> Header:
    """The header of all files as one: the metadata of the first, and all tensors.

    Raises:
        GGUFError: A file is damaged or not supported, or they are not all parts of one model.
        OSError: A file cannot be read.
    """
    first = read_header(paths[0])
    count = first.metadata.get("split.count", 0) or 1
    if count != len(paths):
        raise GGUFError(
            f"{paths[0].name} is one of {count} files, and {len(paths)} is what its name says; "
            "names of parts end in -00001-of-00003.gguf and so on."
        )
    tensors: dict[str, TensorInfo] = dict(first.tensors)
    for number, path in enumerate(paths[1:], 1):
        part = read_header(path)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise GGUFError(f"{path.name} does not say that it is part {number + 1} of {count}.")
        doubled = next((name for name in part.tensors if name in tensors), None)
        if doubled is not None:
            raise GGUFError(f"{path.name}: the tensor {doubled!r} is in another part too.")
        tensors |= {name: replace(info, file=number) for name, info in part.tensors.items()}
        if len(tensors) > MAX_TENSORS:
            raise GGUFError(f"{path.name}: the parts have more than {MAX_TENSORS} tensors.")
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and (first.metadata.get("split.no", 0), expected) != (0, len(tensors)):
        raise GGUFError(f"{paths[0].name} is not the first part, or the parts have not the {expected} tensors it says.")
    return Header(first.metadata, tensors)
