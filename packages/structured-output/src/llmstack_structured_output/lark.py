"""Changes to grammars in Lark's notation before the library reads them."""

from __future__ import annotations

import itertools
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
_LITERAL_OR_NAME = re.compile(rf"(?:{_LITERAL.pattern})|{_NAME.pattern}", re.DOTALL | re.VERBOSE)
# Of grammars within a grammar and rules with parameters, which are not followed here.
_NOT_FOLLOWED = ("%lark", "::")
_LONG_CHAIN = 50
_START = "start_of_the_user"
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


def from_the_leaves(text: str) -> str | None:
    """A grammar with equal errors whose `start` has each rule behind all that it needs; None if it is so already.

    The library follows rules from `start`, and puts the whole text into an error again for each rule that it came
    through. At the end of 1,500 rules an error takes half a minute. Here it is one rule deep.

    Raises:
        ValueError: A terminal needs itself; the text is its name.
    """
    if any(sign in text for sign in _NOT_FOLLOWED):
        return None
    name_to_needs = _needs(text)
    if len(name_to_needs) < _LONG_CHAIN or "start" not in name_to_needs:
        return None
    order = _leaves_first(name_to_needs)
    renamed = _LITERAL_OR_NAME.sub(lambda match: _START if match.group() == "start" else match.group(), text)
    return f"{renamed}\nstart: {' | '.join(_START if name == 'start' else name for name in order)}\n"


def _needs(text: str) -> dict[str, list[str]]:
    """The names that each defined name uses."""
    rules = _LITERAL.sub(" ", text)
    found = [*_DEFINED.finditer(rules)]
    name_to_needs: dict[str, list[str]] = {match[1]: [] for match in found}
    for match, after in itertools.zip_longest(found, found[1:]):
        body = rules[match.end() : after.start() if after is not None else len(rules)]
        name_to_needs[match[1]] += [name for name in _NAME.findall(body) if name in name_to_needs]
    return name_to_needs


def _leaves_first(name_to_needs: Mapping[str, list[str]]) -> list[str]:
    """The names that `start` leads to, each after those that it needs."""
    order: list[str] = []
    path: dict[str, None] = {}
    seen, stack = {"start"}, [("start", iter(name_to_needs["start"]))]
    while stack:
        name, needs = stack[-1]
        path[name] = None
        for needed in needs:
            if needed in path and _is_terminal(needed) and _is_terminal(name):
                raise ValueError(needed)
            if needed not in seen:
                seen.add(needed)
                stack.append((needed, iter(name_to_needs[needed])))
                break
        else:
            stack.pop()
            del path[name]
            order.append(name)
    return order


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def quote(text: str) -> str:
    """A string literal of the notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A regular expression of the notation."""
    return f"/{_SLASH_OR_BREAK.sub(_escaped, pattern)}/"


def _escaped(match: re.Match[str]) -> str:
    sign = match.group()
    return "\\n" if sign[-1] == "\n" else "\\/" if sign == "/" else sign
