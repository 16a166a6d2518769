"""Values in the forms that response templates name, and their transforms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import thread_time
from typing import Any, Final, TypeVar

MAX_PATTERN_S: Final = 0.05
"""A regular expression of a checkpoint takes no more processor time on one text."""
_BARE_KEY: Final = r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):'
_OPEN, _CLOSE = "\x01", "\x02"
Arguments = Mapping[str, Any]
Found = TypeVar("Found")


def limited(match: Callable[..., Found], *arguments: Any, limit_s: float = MAX_PATTERN_S, **options: Any) -> Found:
    """The result of `match`, a function of the package `regex`, in `limit_s` seconds of processor time of this thread.

    The package counts the processor time of all threads. A match that others have ended is begun again, so that an
    answer does not depend on what else runs.

    Raises:
        TimeoutError: It takes longer.
    """
    end_s = thread_time() + limit_s
    while True:
        try:
            return match(*arguments, timeout=limit_s, **options)
        except TimeoutError:
            if thread_time() >= end_s:
                raise


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
        import regex  # late, as below

        text = limited(regex.sub, _BARE_KEY, _quoted_key, text)
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


def _quoted_key(found: Any) -> str:
    return found[0] if found[2] is None else f'{found[1]}"{found[2]}"{found[3]}:'


def _tags(text: str, args: Arguments) -> dict[str, Any]:
    """Keys and values as a pattern finds them, such as `<parameter=city>Paris</parameter>`."""
    import regex  # late: it bounds the time of a pattern, and few templates have one

    found: dict[str, Any] = {}
    repeated: set[str] = set()
    pattern = regex.compile(args["tag_pattern"], regex.DOTALL)
    for match in limited(lambda timeout: [*pattern.finditer(text, timeout=timeout)]):
        key, value = match["key"], _part(match.groupdict().get("value") or "", args)
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
