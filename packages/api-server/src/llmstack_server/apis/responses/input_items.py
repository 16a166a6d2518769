"""The `input` of a request: checked items, and the conversation they form."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.media.parts import MediaPart, read_part
from llmstack_server.apis.responses.compaction import KIND, message_of
from llmstack_server.apis.responses.custom_tools import INPUT
from llmstack_server.apis.responses.store import Item
from llmstack_server.chat.turns import PARTS_JOINT, Content, TurnBuilder, content_of, required_text
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.sse import encode_json
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONValue
from llmstack_types.vocabulary import MediaKind, TextPartType, words_of

FindItem = Callable[[str], Item | None]

ROLES = ("user", "assistant", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp",
}  # fmt: skip
_TEXT_PARTS = words_of(TextPartType)
_SOUND = "input_audio"
_SUMMARY = "encrypted_content"
_IMAGES: frozenset[MediaKind] = frozenset({"image"})
_SOUNDS: frozenset[MediaKind] = frozenset({"audio"})


def new_item_id(kind: str) -> str:
    """A new id for an item of this type."""
    return f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def new_response_id(process_index: int = 0) -> str:
    """A new id for a response, which names the API process that keeps it and cannot be guessed."""
    return f"resp_{process_index:03x}{uuid.uuid4().hex}"


def read_items(value: object, find_item: FindItem) -> Iterator[Item]:
    """The items of `input`, one after the other, each with an id and every key that its type requires.

    Raises:
        InvalidRequestError: The input is missing, or an item invalid, named as in `input[2].content[0].text`.
    """
    if value is None:
        raise missing_parameter("input")
    if isinstance(value, str):
        check_text("input", value)
        yield _message("user", [{"type": "input_text", "text": value}], {})
        return
    if not isinstance(value, list):
        raise request_errors.invalid_type("input", "a string or an array of items", value)
    if not value:
        raise request_errors.empty_array("input")
    for index, item in enumerate(value):
        yield _read_item(f"input[{index}]", item, find_item)


def turns_after(instructions: str | None) -> TurnBuilder:
    """The turns of a conversation that begins with `instructions`."""
    turns = TurnBuilder()
    if instructions is not None:
        turns.say("system", instructions)
    return turns


def adding(items: Iterable[Mapping[str, JSONValue]], turns: TurnBuilder, num_earlier: int = 0) -> Iterator[None]:
    """Adds checked items to the turns, one for each step; `num_earlier` of them are of earlier responses."""
    for index, item in enumerate(items, -num_earlier):
        _ADDERS[item["type"]](turns, item, "previous_response_id" if index < 0 else f"input[{index}]")
        yield


def _read_item(param: str, item: object, find_item: FindItem) -> Item:
    if not isinstance(item, dict):
        raise request_errors.invalid_type(param, "an object", item)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        return _referenced(param, item, find_item)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise request_errors.unsupported_value(
            f"{param}.type", f"this server has no items of type '{request_errors.echo(kind)}'"
        )
    return reader(param, item)


def _referenced(param: str, item: Item, find_item: FindItem) -> Item:
    item_id = required_text(param, item, "id")
    found = find_item(item_id)
    if found is None:
        raise InvalidRequestError("There is no item with this id.", param=f"{param}.id", code="not_found")
    return found


def _read_message(param: str, item: Item) -> Item:
    role = required_text(param, item, "role")
    if role not in ROLES:
        raise request_errors.invalid_value(f"{param}.role", f"expected one of {', '.join(ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    takes_images = role == "user"
    return _message(role, _read_parts(f"{param}.content", item.get("content"), kind, takes_images=takes_images), item)


def _message(role: str, parts: list[dict[str, object]], item: Item) -> Item:
    content = [{**part, "annotations": []} for part in parts] if role == "assistant" else parts
    return _with_id({"type": "message", "role": role, "content": content, "status": "completed"}, item)


def _read_call(param: str, item: Item) -> Item:
    names = ("call_id", "name", "arguments")
    return _with_id({"type": "function_call", **{name: required_text(param, item, name) for name in names}}, item)


def _read_custom_call(param: str, item: Item) -> Item:
    names = ("call_id", "name", "input")
    return _with_id({"type": "custom_tool_call", **{name: required_text(param, item, name) for name in names}}, item)


def _read_call_output(param: str, item: Item) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _read_parts(f"{param}.output", output, "input_text", takes_images=True)
    else:
        check_text(f"{param}.output", output)
    return _with_id({"type": item["type"], "call_id": required_text(param, item, "call_id"), "output": output}, item)


def _read_reasoning(param: str, item: Item) -> Item:
    found: Item = {"type": "reasoning"}
    for field, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(f"{param}.{field}", item.get(field) or [], kinds=(kind,))
        found |= {field: [{"type": kind, "text": text} for text in texts]}
    return _with_id(found, item)


def _read_compaction(param: str, item: Item) -> Item:
    content = required_text(param, item, _SUMMARY)
    if message_of(content) is None:
        raise request_errors.invalid_value(f"{param}.{_SUMMARY}", "it is no summary of this server")
    return _with_id({"type": KIND, _SUMMARY: content}, item)


def _with_id(found: Item, given: Item) -> Item:
    """The item with the client's id and status, where they are valid: they may be from an earlier answer."""
    item_id, status = given.get("id"), given.get("status")
    is_sane = isinstance(item_id, str) and 0 < len(item_id) <= 128
    found["id"] = item_id if is_sane else new_item_id(found["type"])
    found["status"] = status if status in _STATUSES else "completed"
    return found


def _texts(param: str, content: object, *, kinds: Sequence[str] = _TEXT_PARTS) -> list[str]:
    if content is None:
        raise missing_parameter(param)
    if isinstance(content, str):
        check_text(param, content)
        return [content]
    if not isinstance(content, list):
        raise request_errors.invalid_type(param, "a string or an array of content parts", content)
    return [_part_text(f"{param}[{index}]", part, kinds) for index, part in enumerate(content)]


def _read_parts(param: str, content: object, kind: str, *, takes_images: bool) -> list[Item]:
    """The parts of a content: texts of the type `kind`, and pictures and sounds where they may stand."""
    if not (takes_images and isinstance(content, list)):
        return [{"type": kind, "text": text} for text in _texts(param, content)]
    return [
        _MEDIA_READERS[part["type"]](f"{param}[{index}]", part)
        if isinstance(part, dict) and part.get("type") in _MEDIA
        else {"type": kind, "text": _part_text(f"{param}[{index}]", part, _TEXT_PARTS)}
        for index, part in enumerate(content)
    ]


def _read_image(param: str, part: Item) -> Item:
    file_id = None
    if part.get("file_id") is not None:
        file_id = required_text(param, part, "file_id")
        if part.get("image_url") is not None:
            raise request_errors.invalid_value(f"{param}.file_id", "give either 'file_id' or 'image_url'")
        part = {**part, "image_url": ""}
    read = read_part(param, part, _IMAGES)
    found = {"type": "input_image", "image_url": None if file_id else read.url, "detail": read.detail}
    return {**found, **({"file_id": file_id} if file_id else {}), **({"uuid": read.uuid} if read.uuid else {})}


def _read_sound(param: str, part: Item) -> Item:
    """A sound in OpenAI's form, which is kept in that form."""
    read = read_part(param, part, _SOUNDS)
    given = part.get(_SOUND)
    kept = None if given is None else {name: given[name] for name in ("data", "format")}
    return {"type": _SOUND, _SOUND: kept, **({"uuid": read.uuid} if read.uuid else {})}


_MEDIA = ("input_image", _SOUND)
_MEDIA_READERS: Mapping[str, Callable[[str, Item], Item]] = {"input_image": _read_image, _SOUND: _read_sound}


def _part_text(param: str, part: object, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise request_errors.invalid_type(param, "an object", part)
    kind = part.get("type")
    if kind in _MEDIA:
        reason = "pictures and sounds stand in messages of the user and in outputs of calls"
        raise request_errors.unsupported_parameter(f"{param}.type", reason)
    if kind == "input_file":
        raise request_errors.unsupported_parameter(f"{param}.type", "the input may be texts, pictures and sounds")
    if kind == "refusal":
        return required_text(param, part, "refusal")
    if kind not in kinds:
        raise request_errors.invalid_value(f"{param}.type", f"expected '{kinds[0]}'")
    return required_text(param, part, "text")


def _joined(parts: Iterable[Mapping[str, JSONValue]]) -> str:
    return PARTS_JOINT.join(part["text"] for part in parts)


def _content(parts: Sequence[Mapping[str, JSONValue]], param: str, field: str) -> Content:
    """The content of a message; `param` names the item, `field` where the parts are in it."""
    names = (f"{param}.{field}[{index}]" if param.startswith("input") else param for index in range(len(parts)))
    return content_of(
        part["text"] if "text" in part else _media_part(name, part) for name, part in zip(names, parts, strict=True)
    )


def _media_part(param: str, part: Mapping[str, JSONValue]) -> MediaPart:
    if part["type"] == _SOUND:
        return read_part(param, part, _SOUNDS)
    uuid, file_id = part.get("uuid", ""), part.get("file_id", "")
    return MediaPart("image", part["image_url"] or "", uuid, part["detail"], param, file_id)


def _add_message(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    turns.say(item["role"], _content(item["content"], param, "content"))


def _add_call(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    turns.call(item["call_id"], item["name"], item["arguments"])


def _add_custom_call(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    turns.call(item["call_id"], item["name"], encode_json({INPUT: item["input"]}))


def _add_call_output(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    output = item["output"]
    turns.answer(item["call_id"], output if isinstance(output, str) else _content(output, param, "output"))


def _add_reasoning(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    text = _joined(item.get("content") or item["summary"])
    if text:
        turns.think(text)


def _add_compaction(turns: TurnBuilder, item: Mapping[str, JSONValue], param: str) -> None:
    turns.say("user", message_of(item[_SUMMARY]) or "")


_READERS: Mapping[str, Callable[[str, Item], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_call_output,
    "reasoning": _read_reasoning,
    KIND: _read_compaction,
}
_ADDERS: Mapping[str, Callable[[TurnBuilder, Mapping[str, JSONValue], str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_call_output,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_call_output,
    "reasoning": _add_reasoning,
    KIND: _add_compaction,
}
