"""Turns of a request, as the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.media.parts import MediaPart
from llmstack_server.apis.anthropic.content import Block
from llmstack_server.apis.anthropic.images import read_image
from llmstack_server.apis.anthropic.quotes import QUOTES, texts_joint
from llmstack_server.chat.turns import Content, TurnBuilder, content_of, required_text
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.sse import encode_json

ROLES = ("user", "assistant", "system")
_MEDIA_BLOCKS = ("image", "container_upload")
_NO_PLACE = "pictures stand in messages of the user and in results of tools, and there is no other media"


def read_messages(system: object, messages: Sequence[Block] | None) -> list[dict[str, object]]:
    """The messages; consecutive texts of one role are one turn.

    Raises:
        InvalidRequestError: A block is invalid, named as in `messages[2].content[0].text`.
    """
    if messages is None:
        raise missing_parameter("messages")
    if not messages:
        raise request_errors.empty_array("messages")
    turns = TurnBuilder(joins_turns=True)
    if system is not None:
        turns.say("system", texts_joint("system", system, _text_of_block))
    for index, message in enumerate(messages):
        _read_message(turns, f"messages[{index}]", message)
    if not turns.messages:  # an assistant's turn without content, alone
        raise request_errors.empty_array("messages[0].content")
    return turns.messages


def continues_last_message(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether the last turn is the beginning of the answer, which the model continues."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _read_message(turns: TurnBuilder, param: str, message: Block) -> None:
    role, content = message.get("role"), message.get("content")
    if role is None:
        raise missing_parameter(f"{param}.role")
    if role not in ROLES:
        raise request_errors.invalid_value(f"{param}.role", f"expected one of {', '.join(ROLES)}")
    if content is None:
        raise missing_parameter(f"{param}.content")
    if isinstance(content, str):
        check_text(f"{param}.content", content)
        turns.say(role, content)
        return
    if not isinstance(content, list):
        raise request_errors.invalid_type(f"{param}.content", "a string or an array of content blocks", content)
    if not content and role != "assistant":
        raise request_errors.empty_array(f"{param}.content")
    _read_blocks(turns, f"{param}.content", role, content)


def _read_blocks(turns: TurnBuilder, param: str, role: str, blocks: Sequence[Any]) -> None:
    """Adds the blocks; adjacent texts become one, results of calls become separate messages."""
    pieces: list[str | MediaPart] = []
    for index, block in enumerate(blocks):
        place = f"{param}[{index}]"
        kind = _kind_of(place, block)
        if kind == "text" or (role == "user" and kind in QUOTES):
            pieces.append(_text_of_block(place, block))
            continue
        if kind == "image" and role == "user":
            pieces.append(read_image(place, block))
            continue
        _say(turns, role, pieces)
        _reader_of(place, role, block)(turns, place, block)
    _say(turns, role, pieces)


def _say(turns: TurnBuilder, role: str, pieces: list[str | MediaPart]) -> None:
    if pieces:
        turns.say(role, content_of(pieces))
        pieces.clear()


def _kind_of(param: str, block: object) -> str:
    if not isinstance(block, dict):
        raise request_errors.invalid_type(param, "an object", block)
    return required_text(param, block, "type")


def _reader_of(param: str, role: str, block: Block) -> Callable[[TurnBuilder, str, Block], None]:
    reader = _READERS.get((role, block["type"]))
    if reader is not None:
        return reader
    if block["type"] in _MEDIA_BLOCKS:
        raise request_errors.unsupported_parameter(f"{param}.type", _NO_PLACE)
    kind = request_errors.echo(block["type"])
    raise request_errors.invalid_value(f"{param}.type", f"'{kind}' is no block of a message of the role '{role}'")


def _read_result(turns: TurnBuilder, param: str, block: Block) -> None:
    content = block.get("content")
    place = f"{param}.content"
    shown: Content = ""
    if isinstance(content, list):
        shown = content_of(_read_piece(f"{place}[{index}]", one) for index, one in enumerate(content))
    elif content is not None:
        shown = texts_joint(place, content, _text_of_block)
    turns.answer(required_text(param, block, "tool_use_id"), shown)


def _read_piece(param: str, block: Any) -> str | MediaPart:
    return read_image(param, block) if _kind_of(param, block) == "image" else _text_of_block(param, block)


def _read_call(turns: TurnBuilder, param: str, block: Block) -> None:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise request_errors.invalid_type(f"{param}.input", "an object", arguments)
    turns.call(required_text(param, block, "id"), required_text(param, block, "name"), encode_json(arguments))


def _read_thinking(turns: TurnBuilder, param: str, block: Block) -> None:
    text = required_text(param, block, "thinking")
    if text:
        turns.think(text)


def _read_redacted_thinking(turns: TurnBuilder, param: str, block: Block) -> None:
    """Skips the block, which only Anthropic can decrypt."""


def _text_of_block(param: str, block: Any) -> str:
    kind = _kind_of(param, block)
    if kind in QUOTES:
        return QUOTES[kind](param, block)
    if kind in _MEDIA_BLOCKS:
        raise request_errors.unsupported_parameter(f"{param}.type", _NO_PLACE)
    if kind != "text":
        raise request_errors.invalid_value(f"{param}.type", "expected 'text'")
    return required_text(param, block, "text")


_READERS: Mapping[tuple[str, str], Callable[[TurnBuilder, str, Block], None]] = {
    ("user", "tool_result"): _read_result,
    ("assistant", "tool_use"): _read_call,
    ("assistant", "thinking"): _read_thinking,
    ("assistant", "redacted_thinking"): _read_redacted_thinking,
}
