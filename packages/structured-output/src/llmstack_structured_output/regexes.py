"""Regular expressions, compiled to automata by the grammar library, never by `re`."""

from __future__ import annotations

from llguidance import LLMatcher

from llmstack_structured_output import errors
from llmstack_structured_output.limits import GrammarLimits

_ASCII_CLASSES = {
    r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]", r"\S": r"[^ \t\n\r\f\v]",
}  # fmt: skip


def regex_grammar(param: str, pattern: str, limits: GrammarLimits) -> str:
    """The grammar of the texts that match as a whole; `^` and `$` around the pattern say the same and may be there.

    Raises:
        InvalidRequestError: It is over a limit.
    """
    check_regex(param, pattern, limits)
    return LLMatcher.grammar_from_regex(with_ascii_classes(without_anchors(pattern)))


def with_ascii_classes(pattern: str) -> str:
    r"""The pattern with `\d`, `\w` and `\s` written out in ASCII; the library's own match all of Unicode."""
    written = [""]
    num_open = at = 0  # brackets of classes, which may be nested
    while at < len(pattern):
        sign = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(sign)
        characters = _ASCII_CLASSES.get(sign)
        if characters is not None and num_open and written[-1] == "-" and written[-2] != "-":
            written[-1] = r"\-"  # it stands for itself, as a class is no end of a range
        is_first_in_class = written[-1] == "[" or written[-2:] == ["[", "^"]
        if sign == "[":
            num_open += 1
        elif sign == "]" and num_open and not is_first_in_class:
            num_open -= 1
        written.append(characters or sign)
    return "".join(written)


def check_regex(param: str, pattern: str, limits: GrammarLimits, *, is_in_schema: bool = False) -> None:
    """Checks length and repetitions.

    Raises:
        InvalidRequestError: It is over a limit.
    """
    refuse = errors.schema_too_complex if is_in_schema else errors.grammar_too_complex
    if len(pattern.encode("utf-8", "replace")) > limits.max_regex_bytes:
        raise refuse(param, f"a pattern has more than {limits.max_regex_bytes} bytes")
    if _largest_repeat(pattern) > limits.max_repeat:
        raise refuse(param, f"a pattern repeats more than {limits.max_repeat} times")


def without_anchors(pattern: str) -> str:
    """The pattern without one `^` before it and one `$` behind it, where they can only mean the whole text's ends."""
    if _has_alternatives(pattern):
        return pattern
    start = 1 if pattern.startswith("^") else 0
    end = len(pattern)
    if pattern.endswith("$") and not _is_escaped(pattern, end - 1):
        end -= 1
    return pattern[start:end]


def _has_alternatives(pattern: str) -> bool:
    """Whether a `|` is outside of all groups: an anchor then belongs to one side of it."""
    depth, is_class, is_escape = 0, False, False
    for char in pattern:
        if is_escape:
            is_escape = False
        elif char == "\\":
            is_escape = True
        elif is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
    return False


def _is_escaped(pattern: str, index: int) -> bool:
    before = pattern[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _largest_repeat(pattern: str) -> int:
    """The largest number in braces."""
    largest = 0
    for part in pattern.split("{")[1:]:
        inside = part.partition("}")[0]
        for number in inside.split(",")[:2]:
            digits = number.strip().lstrip("0")
            if digits.isdecimal():
                largest = max(largest, int(digits[:9]))
    return largest
