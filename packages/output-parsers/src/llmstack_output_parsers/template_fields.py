"""The fields of a response template: where parts of a message lie in a text.

A checkpoint has the template in its `tokenizer_config.json`, for `parse_response` of transformers:
https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llmstack_output_parsers.template_values import CONTENT_READERS

VERSION: Final = 1
MAX_NUM_READERS: Final = 8
"""Forms of values within one another."""
_META: Final = frozenset(".^$*+?{}[]|()")
_QUANTIFIERS: Final = frozenset("*+?{")
_TAG: Final = r"<[^<>\s]+>|\[/?[A-Z_]+\]"
_GROUP: Final = r"\(\?P?<\w+>"
PYTHON_CALLS: Final = "python-call-list"
"""The content that parsers of Python's calls read."""
_KEYS: Final = frozenset(
    ("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
     "transform", "transform_each")
)  # fmt: skip


class ResponseTemplateError(ValueError):
    """A response template is malformed, or has a form that is not read; the text says which."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the message.

    Attributes:
        opens: Texts that begin it; none where all text belongs to it that belongs to no other field.
        open_pattern: A regular expression that begins it, in place of texts; its groups are values of the transform.
        closes: Texts that end it; without any the end of the message does.
        content: How its text is read: see `template_values`.
        transform: The form of its value, with names of values in braces; None for the content itself.
        is_each: Whether the transform is applied to each entry of the content.
    """

    opens: tuple[str, ...] = ()
    open_pattern: str = ""
    closes: tuple[str, ...] = ()
    content: str = "text"
    content_args: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    is_each: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts with which it begins, which a pattern continues."""
        return (literal_start(self.open_pattern),) if self.open_pattern else self.opens

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts around the field that may be special tokens."""
        if not self.open_pattern:
            return (*self.opens, *self.closes)
        import regex  # late: few templates have patterns

        found = regex.findall(_TAG, regex.sub(_GROUP, "", self.open_pattern).replace("\\", ""))
        return tuple(dict.fromkeys((*found, *self.closes)))


def read_fields(template: object) -> dict[str, Field]:
    """The fields of a template, by their names in the message.

    Raises:
        ResponseTemplateError: It is none, of another version, or a field cannot be read.
    """
    if not isinstance(template, Mapping) or not isinstance(template.get("fields"), Mapping):
        raise ResponseTemplateError("it has no fields")
    version = template.get("version", VERSION)
    if version != VERSION:
        raise ResponseTemplateError(f"version {str(version)[:16]} is unknown")
    return {str(name): _read_field(str(name), given) for name, given in template["fields"].items()}


def _read_field(name: str, given: object) -> Field:
    if not isinstance(given, Mapping) or set(given) - _KEYS:
        raise ResponseTemplateError(f"field '{name[:32]}' has unknown settings")
    content, content_args = given.get("content", "text"), given.get("content_args") or {}
    if content not in (*CONTENT_READERS, PYTHON_CALLS) or not isinstance(content_args, Mapping):
        raise ResponseTemplateError(f"field '{name[:32]}' has the unknown content '{str(content)[:32]}'")
    if given.get("close_pattern") is not None:
        raise ResponseTemplateError(f"field '{name[:32]}' ends by a pattern")
    pattern = given.get("open_pattern") or ""
    found = Field(
        _texts(name, given.get("open")), str(pattern), _texts(name, given.get("close")), content, content_args,
        given.get("transform"), given.get("transform_each") is True,
    )  # fmt: skip
    if pattern and not literal_start(str(pattern)):
        raise ResponseTemplateError(f"field '{name[:32]}' begins by a pattern without a text in front")
    _check_patterns(name, found)
    return found


def _check_patterns(name: str, found: Field) -> None:
    """Raises ResponseTemplateError for settings of values, and for patterns, that cannot be used."""
    readers = [(found.content, found.content_args)]
    while (reader := readers[-1][1].get("value_parser")) is not None:
        if len(readers) == MAX_NUM_READERS or not isinstance(reader, Mapping):
            raise ResponseTemplateError(f"field '{name[:32]}' has values of an unknown form")
        readers.append((reader.get("name", "text"), reader.get("args") or {}))
        if readers[-1][0] not in (*CONTENT_READERS,) or not isinstance(readers[-1][1], Mapping):
            raise ResponseTemplateError(f"field '{name[:32]}' has values of an unknown form")
    for _, args in readers:
        _check_separators(name, args)
    tags = [str(args.get("tag_pattern") or "") for content, args in readers if content == "xml-inline"]
    patterns = [*tags, *filter(None, (found.open_pattern,))]
    if not patterns and not any(args.get("unquoted_keys") for _, args in readers):
        return
    try:
        import regex  # late: few templates need it
    except ImportError as error:
        raise ResponseTemplateError("its patterns need the package regex") from error
    try:
        groups = [set(regex.compile(pattern).groupindex) for pattern in patterns]
    except regex.error as error:
        raise ResponseTemplateError(f"field '{name[:32]}' has a malformed pattern: {error}") from error
    if not all("key" in one for one in groups[: len(tags)]):
        raise ResponseTemplateError(f"field '{name[:32]}' has a pattern without a group 'key'")


def _check_separators(name: str, args: Mapping[str, object]) -> None:
    """Raises ResponseTemplateError for separators and quotes that are no texts: an empty one is found for ever."""
    texts = [args.get("kv_sep", ":"), args.get("line_sep", "\n")]
    delims = args.get("string_delims") or ()
    if not isinstance(delims, list | tuple) or not all(
        isinstance(one, list | tuple) and len(one) == 2 for one in delims
    ):
        raise ResponseTemplateError(f"field '{name[:32]}' has no pairs of quotes in 'string_delims'")
    if not all(isinstance(text, str) and text for text in (*texts, *(text for pair in delims for text in pair))):
        raise ResponseTemplateError(f"field '{name[:32]}' has a separator that is no text")


def _texts(name: str, given: object) -> tuple[str, ...]:
    texts = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ResponseTemplateError(f"field '{name[:32]}' has no texts around it")
    return tuple(sorted(dict.fromkeys(texts), key=lambda text: -len(text)))


def literal_start(pattern: str) -> str:
    """The text with which all that a regular expression matches begins; empty where there is none."""
    literal: list[str] = []
    index, depth = 0, 0
    while index < len(pattern):
        character = pattern[index]
        is_escape = character == "\\"
        plain = pattern[index + 1 : index + 2] if is_escape else character
        if (character in _META) if not is_escape else (not plain or plain.isalnum()):
            break
        literal.append(plain)
        index += 1 + is_escape
    if index < len(pattern) and pattern[index] in _QUANTIFIERS and literal:
        literal.pop()
    for character in pattern[index:]:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return ""
    return "".join(literal)
