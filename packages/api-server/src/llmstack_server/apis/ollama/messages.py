"""Conversations of Ollama's requests, in the form of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_text
from llmstack_llm.media.parts import MediaPart
from llmstack_server.apis.ollama.names import Fields
from llmstack_server.apis.ollama.protocol import ChatRequest, GenerateRequest
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.turns import content_of
from llmstack_server.web.errors import missing_parameter

EFFORTS = ("low", "medium", "high")


def conversation_of_chat(fields: ChatRequest) -> Conversation:
    """The conversation of a chat; an assistant's last message is continued.

    Raises:
        InvalidRequestError: Names the message and the field.
    """
    messages = [_read_message(f"messages[{index}]", one) for index, one in enumerate(fields.messages or ())]
    last = messages[-1] if messages else {}
    is_continued = last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    return Conversation(
        _with_call_ids(messages),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        tools=fields.tools or None,
        **_thinking(fields.think),
    )


def conversation_of_prompt(fields: GenerateRequest) -> Conversation:
    """The conversation of one question, with the instructions before it.

    Raises:
        InvalidRequestError: `think` or a picture is malformed.
    """
    asked = {"role": "user", "content": _content(fields.prompt or "", fields.images, "images")}
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    return Conversation([*system, asked], **_thinking(fields.think))


def _thinking(think: object) -> Fields:
    """The arguments of the chat template that `think` stands for."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think, "thinking": think}}
    if think not in EFFORTS:
        raise request_errors.invalid_value("think", f"expected a boolean, or one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": think}


def _read_message(param: str, message: Mapping[str, object]) -> Fields:
    """A message; the checks of chats look at what it copies."""
    content = message.get("content")
    read = {"role": message.get("role"), "content": content}
    if read["role"] is None:
        raise missing_parameter(f"{param}.role")
    if message.get("images"):
        if not isinstance(content, str | None):
            raise request_errors.invalid_type(f"{param}.content", "a string", content)
        read["content"] = _content(content or "", message["images"], f"{param}.images")
    elif content is None:
        read["content"] = ""
    for name, own in (("thinking", "reasoning_content"), ("tool_calls", "tool_calls"), ("tool_name", "name"),
                      ("tool_call_id", "tool_call_id")):  # fmt: skip
        if message.get(name):
            read[own] = message[name]
    return read


def _content(text: str, images: object, param: str) -> str | list[dict[str, str] | MediaPart]:
    """A text with pictures after it."""
    if not isinstance(images, list | None):
        raise request_errors.invalid_type(param, "an array of pictures in base64", images)
    parts: list[str | MediaPart] = [text] if text else []
    for index, image in enumerate(images or ()):
        place = f"{param}[{index}]"
        if not isinstance(image, str):
            raise request_errors.invalid_type(place, "a picture in base64", image)
        check_text(place, image)
        # The first bytes of a picture decide what it is.
        parts.append(MediaPart("image", f"data:image/png;base64,{image}", param=place))
    return content_of(parts)


def _with_call_ids(messages: Sequence[Fields]) -> list[Fields]:
    """The messages, whose calls and results have ids: results answer the earliest open call of their name."""
    open_calls: list[tuple[str, object]] = []
    num_calls = 0
    numbered = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
            named = []
            for call in calls:
                function = call.get("function")
                named.append({"id": f"call_{num_calls}", "type": "function", **call})
                open_calls.append((named[-1]["id"], function.get("name") if isinstance(function, dict) else None))
                num_calls += 1
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool" and "tool_call_id" not in message and open_calls:
            asked = message.get("name")
            found = next((one for one in open_calls if asked in (None, one[1])), open_calls[0])
            open_calls.remove(found)
            message = {**message, "tool_call_id": found[0]}
        numbered.append(message)
    return numbered
