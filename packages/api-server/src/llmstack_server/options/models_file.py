"""The file of `--models`: names, models and the memory that they share."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from llmstack_server.options.config_file import MAX_FILE_BYTES, read_mapping
from llmstack_server.options.process_options import read_duration

MAX_NUM_MODELS: Final = 64
MAX_NUM_ALIASES: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_SIZE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([KMGT])(?:iB|B)?")
_SIZE_TO_BYTES: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_REQUIRED: Final = object()
_MAX_SHOWN_CHARS: Final = 100
"""Of a model's name, in those of its files; such names have 255 at most."""


class ModelEntry(NamedTuple):
    """One model of the file.

    Attributes:
        name: The name in the API.
        model: Folder or repository id.
        memory_bytes: All memory that its engine core may use.
        idle_sleep_s: Seconds without requests until it sleeps; None for never.
        sleep_level: 1 gives the KV cache back, 2 the weights too.
        aliases: Further names.
        flags: Options of the engine and of chats, as in a file of `--config`.
    """

    name: str
    model: str
    memory_bytes: int
    idle_sleep_s: float | None
    sleep_level: int
    aliases: tuple[str, ...]
    flags: Mapping[str, object]

    @property
    def file_name(self) -> str:
        """The model's name in names of files and folders: no two models have the same."""
        shown = quote(self.name, safe="")[:_MAX_SHOWN_CHARS]
        return f"{shown}.{hashlib.sha256(self.name.encode()).hexdigest()[:16]}"


class ModelsFile(NamedTuple):
    """The content of the file.

    Attributes:
        memory_bytes: All memory that the engine cores may use together.
        loads_per_minute: Loads that one API key may cause in a minute.
        load_timeout_s: Seconds that a request waits for its model.
        models: In the order of the file, at least one.
    """

    memory_bytes: int
    loads_per_minute: int
    load_timeout_s: float
    models: tuple[ModelEntry, ...]


def read_models_file(path: str) -> ModelsFile:
    """The file at `path`, which only we may write.

    Raises:
        ValueError: It is at fault; the text has a line for each reason.
    """
    content = read_own_file(path)
    reader = _Reader()
    values = reader.values("", read_mapping(content), _FILE_KEYS)
    named = values["models"] if isinstance(values["models"], dict) else {}
    entries = [ModelEntry(name, **reader.values(f"{name}: ", of, _MODEL_KEYS)) for name, of in named.items()]
    reader.problems += _name_problems(entries)
    if not reader.problems:
        reader.problems += _memory_problems(entries, values["memory"])
    if reader.problems:
        raise ValueError("\n".join(reader.problems))
    return ModelsFile(values["memory"], values["loads_per_minute"], values["load_timeout"], tuple(entries))


def read_own_file(path: str) -> bytes:
    """The content of a file of ours that no other account can write.

    Raises:
        ValueError: It cannot be read, or is another's, or others may write it.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise ValueError("it belongs to another account: who writes it chooses what this server runs")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("a group or others may write it: chmod go-w")
    return content


class _Key(NamedTuple):
    """A key of the file: the field it becomes, how its value is read, and its default."""

    field: str
    read: Callable[[object], Any]
    default: object = _REQUIRED


class _Reader:
    """Reads mappings by closed tables of keys; `problems` has a sentence for each fault."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def values(self, where: str, found: object, keys: Mapping[str, _Key]) -> dict[str, Any]:
        """Field to value; None where there is a problem."""
        if not isinstance(found, dict):
            self.problems.append(f"{where}it must map keys to values, such as 'model: /models/one'")
            return dict.fromkeys(key.field for key in keys.values())
        given = {str(name).replace("-", "_"): value for name, value in found.items()}
        if len(given) < len(found):
            self.problems.append(f"{where}a key is set twice, under two spellings")
        import difflib  # late: only a mistyped key needs it

        for name in sorted(given.keys() - keys.keys()):
            nearest = difflib.get_close_matches(name, keys, n=1)
            advice = f"; did you mean '{nearest[0]}'?" if nearest else f"; there are {', '.join(keys)}"
            self.problems.append(f"{where}unknown key '{name[:64]}'{advice}")
        return {key.field: self._value(where, name, key, given) for name, key in keys.items()}

    def _value(self, where: str, name: str, key: _Key, given: Mapping[str, object]) -> Any:
        if given.get(name) is None:
            if key.default is _REQUIRED:
                self.problems.append(f"{where}'{name}' is missing")
                return None
            return key.default
        try:
            return key.read(given[name])
        except ValueError as error:
            self.problems.append(f"{where}{name}: {error}")
            return None


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a text")
    return value


def _read_scalar(value: object) -> str:
    """The text of a plain value. A list may have aliases of lists: its text can be larger than all memory."""
    if not isinstance(value, str | int | float):
        raise ValueError("it must be one value, such as 512M or 10m")
    return str(value)


def _read_size(value: object) -> int:
    text = _read_scalar(value)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:32]!r} is not a size such as 512M or 24G")
    return int(float(match[1]) * _SIZE_TO_BYTES[match[2]])


def _read_time(value: object) -> float | None:
    """Seconds; None for 0, which is never."""
    seconds = read_duration(_read_scalar(value))
    if 0 < seconds < 1:
        raise ValueError("it must be at least 1s, or 0 for never")
    return seconds or None


def _read_timeout(value: object) -> float:
    seconds = read_duration(_read_scalar(value))
    if not 1 <= seconds <= 3600:
        raise ValueError("it must be between 1s and 1h")
    return seconds


def _reads_integer(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"it must be an integer from {least} to {most}")
        return value

    return read


def _read_names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > MAX_NUM_ALIASES or not all(isinstance(one, str) for one in names):
        raise ValueError(f"it must be a list of at most {MAX_NUM_ALIASES} names, in quotes where YAML sees no text")
    return tuple(names)


def _read_flags(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("it must map options to values, such as 'max_model_len: 4096'")
    return value


def _read_models(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_NUM_MODELS:
        raise ValueError(f"it must map names to models, 1 to {MAX_NUM_MODELS} of them")
    if not all(isinstance(name, str) for name in value):
        raise ValueError("a name has to be in quotes where YAML sees no text, such as 'yes' or '7'")
    return value


_FILE_KEYS: Final = {
    "memory": _Key("memory", _read_size),
    "loads_per_minute": _Key("loads_per_minute", _reads_integer(1, 1000), 6),
    "load_timeout": _Key("load_timeout", _read_timeout, 300.0),
    "models": _Key("models", _read_models),
}
_MODEL_KEYS: Final = {
    "model": _Key("model", _read_text),
    "memory": _Key("memory_bytes", _read_size),
    "idle_sleep": _Key("idle_sleep_s", _read_time, None),
    "sleep_level": _Key("sleep_level", _reads_integer(1, 2), 1),
    "aliases": _Key("aliases", _read_names, ()),
    "flags": _Key("flags", _read_flags, {}),
}


def _name_problems(entries: Sequence[ModelEntry]) -> Iterator[str]:
    seen = set[str]()
    for entry in entries:
        for name in (entry.name, *(entry.aliases or ())):
            if not _NAME.fullmatch(name):
                yield f"{name[:64]!r} is no name: 1 to 128 letters, digits and . _ : / @ -, the first no sign"
            if name in seen:
                yield f"{name}: another model has this name"
            seen.add(name)


def _memory_problems(entries: Sequence[ModelEntry], limit_bytes: int) -> Iterator[str]:
    for entry in entries:
        if entry.memory_bytes > limit_bytes:
            yield f"{entry.name}: its memory of {entry.memory_bytes >> 20} MiB never fits into {limit_bytes >> 20} MiB"
