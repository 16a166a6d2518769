"""Test support for parsers: sums of deltas, and a check for every parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.protocols import OutputParser, ParsedDelta, ToolCallDelta


@dataclass(slots=True)
class FoldedMessage:
    """The sum of a message's deltas; a call is its function's name and the text of its arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def fold(deltas: Iterable[ParsedDelta]) -> FoldedMessage:
    """Adds up the deltas of one message.

    Raises:
        ValueError: The deltas of a call are not in the form that clients expect.
    """
    folded = FoldedMessage()
    for delta in deltas:
        folded.content += delta.content
        folded.reasoning += delta.reasoning
        for call in delta.tool_calls:
            _add(folded.calls, call)
    return folded


def _add(calls: list[tuple[str, str]], delta: ToolCallDelta) -> None:
    if delta.index == len(calls) and delta.id and delta.name:
        calls.append((delta.name, delta.arguments))
    elif delta.index == len(calls) - 1 and delta.id is None and delta.name is None:
        name, arguments = calls[-1]
        calls[-1] = name, arguments + delta.arguments
    else:
        raise ValueError(f"{delta} cannot follow {len(calls)} calls")


def parse(parser: OutputParser, pieces: Iterable[str]) -> FoldedMessage:
    """Gives a parser all of a message, in these pieces."""
    return fold([*(parser.feed(piece) for piece in pieces), parser.finish()])


def cut(text: str, places: Iterable[int]) -> Sequence[str]:
    """The text in pieces; places outside of it are left out."""
    bounds = [0, *sorted({place for place in places if 0 < place < len(text)}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def check_output_parser(make: Callable[[], OutputParser], text: str, places: Iterable[int] = ()) -> FoldedMessage:
    """The message that a parser makes of a text.

    Raises:
        ValueError: The message differs if the text is cut at `places` or into single characters.
    """
    whole = parse(make(), [text])
    for pieces in (cut(text, places), list(text)):
        in_pieces = parse(make(), pieces)
        if in_pieces != whole:
            raise ValueError(f"{whole} in one piece, {in_pieces} in {len(pieces)}")
    return whole


def check_calls(make: Callable[[], ToolParser], text: str, places: Iterable[int] = ()) -> FoldedMessage:
    """The message that a parser of calls makes of a text, which may be cut anywhere.

    Raises:
        ValueError: As `check_output_parser`; arguments are no JSON object; or a control token is content.
    """
    found = check_output_parser(make, text, places)
    for name, arguments in found.calls:
        if not isinstance(json.loads(arguments), dict):
            raise ValueError(f"the arguments of {name} are no object: {arguments}")
    leaked = [token for token in make().no_content if token in found.content]
    if leaked:
        raise ValueError(f"{leaked} in the content {found.content!r}")
    return found
