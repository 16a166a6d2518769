"""Values in the forms that response templates name, and their transforms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from llmstack_output_parsers.patterns import compiled

_OPEN, _CLOSE = "\x01", "\x02"
Arguments = Mapping[str, Any]


def _text(text: str, args: Arguments) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Arguments) -> Any:
    """JSON, where the arguments say so with bare keys or other quotes."""
    strings: list[str] = []
    if _OPEN in text or _CLOSE in text:
        raise ValueError("control characters are no JSON")
    for opening, closing in args.get("string_delims") or ():
        text = _without_strings(text, opening, closing, strings)
    if args.get("unquoted_keys"):
        text = _with_quoted_keys(text)
    text = _with_strings(text, strings)
    try:
        return json.loads(text)
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _without_strings(text: str, opening: str, closing: str, strings: list[str]) -> str:
    """The text with numbers in place of the strings between the quotes; they are added to `strings`."""
    pieces: list[str] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        pieces += [text[position:start], f"{_OPEN}{len(strings)}{_CLOSE}"]
        strings.append(text[start + len(opening) : end])
        position = end + len(closing)
    return "".join((*pieces, text[position:]))


def _with_strings(text: str, strings: list[str]) -> str:
    first, *rest = text.split(_OPEN)
    parts = (part.partition(_CLOSE) for part in rest)
    return "".join((first, *(f"{json.dumps(strings[int(number)])}{behind}" for number, _, behind in parts)))


def _with_quoted_keys(text: str) -> str:
    """The text with quotes around keys that have none, in one pass; strings stay as they are."""
    pieces: list[str] = []
    start = index = 0
    while index < len(text):
        opening, index = text[index], index + 1
        if opening == '"':
            index = _end_of_string(text, index)
        elif opening in "{,":
            key = _skip(text, index, str.isspace)
            index = _skip(text, key, _is_of_name)
            colon = _skip(text, index, str.isspace)
            if index > key and text[colon : colon + 1] == ":":
                pieces += [text[start:key], f'"{text[key:index]}"']
                start = index
    return "".join((*pieces, text[start:]))


def _end_of_string(text: str, index: int) -> int:
    """The place behind the quote that ends a string; the end of the text where none does."""
    while (quote := text.find('"', index)) >= 0:
        num_escapes = quote - index - len(text[index:quote].rstrip("\\"))
        index = quote + 1
        if num_escapes % 2 == 0:
            return index
    return len(text)


def _skip(text: str, index: int, accepts: Callable[[str], bool]) -> int:
    while index < len(text) and accepts(text[index]):
        index += 1
    return index


def _is_of_name(char: str) -> bool:
    return char.isalnum() or char == "_"


def _tags(text: str, args: Arguments) -> dict[str, Any]:
    """Keys and values as a pattern finds them, such as `<parameter=city>Paris</parameter>`."""
    found: dict[str, Any] = {}
    repeated: set[str] = set()
    for match in compiled(args["tag_pattern"]).find_all(text):
        key, value = match.groups["key"], _part(match.groups.get("value", ""), args)
        if key not in found or not args.get("merge_duplicates"):
            found[key] = value
            continue
        found[key] = [*found[key], value] if key in repeated else [found[key], value]
        repeated.add(key)
    return found


def _lines(text: str, args: Arguments) -> dict[str, Any]:
    """A key and a value in each line."""
    separator = args.get("kv_sep", ":")
    pairs = (line.partition(separator) for line in text.split(args.get("line_sep", "\n")) if separator in line)
    return {key.strip(): _part(value.strip(), args) for key, _, value in pairs}


def _part(text: str, args: Arguments) -> Any:
    reader = args.get("value_parser")
    return text if reader is None else CONTENT_READERS[reader.get("name", "text")](text, reader.get("args") or {})


CONTENT_READERS: Final[Mapping[str, Callable[[str, Arguments], Any]]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}
"""Readers of a text by the names of their forms. Each raises an exception for a text that has another form."""


def transformed(transform: object, values: Mapping[str, object]) -> Any:
    """The transform with the values that it names, as `{name}` or `{name.key}`.

    Raises:
        KeyError: There is no such value.
    """
    if isinstance(transform, dict):
        return {key: transformed(part, values) for key, part in transform.items()}
    if isinstance(transform, list):
        return [transformed(part, values) for part in transform]
    if not isinstance(transform, str) or not is_name(transform):
        return transform
    value: object = values
    for key in transform[1:-1].split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[key]
    return value


def is_name(text: str) -> bool:
    """Whether a text of a transform names a value, as `{name}` or `{name.key}`."""
    return text[:1] == "{" and text[-1:] == "}" and all(part.isidentifier() for part in text[1:-1].split("."))
