"""Changes to grammars in Lark's notation before the library reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from llmstack_structured_output.regexes import with_ascii_classes

# The tokens of the notation that may hold each other's signs. A literal without its end reaches to the end of the text,
# so that each sign is read once.
_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*+"?)|(?P<comment>(?:\#|//)[^\n]*+)|(?P<regex>/(?:\\.|[^/\\])++/?)"""
    r"""|(?P<special><[^<>\s]++>)""",
    re.DOTALL,
)
_LITERAL = re.compile(rf"(?:{_TOKEN.pattern})[a-z]*+", re.DOTALL | re.VERBOSE)
_SIMPLE = re.compile(r"[\w\s:|()*+?~.&-]*+")
_DEFINED = re.compile(r"^[ \t]*+[!?]?([A-Za-z_][\w-]*+)(?:\.\d++)?[ \t]*+:", re.MULTILINE)
_NAME = re.compile(r"(?<![\w-])[A-Za-z_][\w-]*+")
_SLASH_OR_BREAK = re.compile(r"\\.|[/\n]", re.DOTALL)


def prepared(text: str, special_tokens: Mapping[str, int], refuse: Callable[[str], Exception]) -> str:
    """The grammar with special tokens by their ids, and with ASCII classes in its regular expressions."""

    def written(match: re.Match[str]) -> str:
        token = match.group()
        if match.lastgroup == "regex":
            return with_ascii_classes(token)
        if match.lastgroup != "special" or token.startswith("<["):
            return token
        if token not in special_tokens:
            raise refuse(f"there is no special token {token[:64]}")
        return f"<[{special_tokens[token]}]>"

    return _TOKEN.sub(written, text)


def unknown_name(text: str) -> str | None:
    """The first name that a simple grammar uses and does not define; None also for one with more of the notation.

    The library needs seconds to say so behind a long chain of rules: each of them adds the whole text to its message.
    """
    rules = _LITERAL.sub(" ", text)
    if not _SIMPLE.fullmatch(rules):
        return None
    defined = set(_DEFINED.findall(rules))
    return next((name for name in _NAME.findall(rules) if name not in defined), None)


def quote(text: str) -> str:
    """A string literal of the notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A regular expression of the notation."""
    return f"/{_SLASH_OR_BREAK.sub(_escaped, pattern)}/"


def _escaped(match: re.Match[str]) -> str:
    sign = match.group()
    return "\\n" if sign[-1] == "\n" else "\\/" if sign == "/" else sign
