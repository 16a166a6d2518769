"""Output items of a response, and the events of their growth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterator, Sequence

from llmstack_output_parsers import ToolCallDelta
from llmstack_server.apis.responses.custom_tools import input_of
from llmstack_server.apis.responses.input_items import new_item_id
from llmstack_server.apis.responses.store import Item
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.state.answer_source import lasting
from llmstack_types.json_values import JSONObject

# The type of an event and its fields, without the sequence number.
Event = tuple[str, JSONObject]
Logprobs = Sequence[JSONObject]


class _TextItem(ABC):
    """An item with a single text part."""

    def __init__(self, kind: str, text_event: str) -> None:
        self.id = lasting(new_item_id(kind))
        self._text_event = text_event
        self._has_part = False
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def _part(self) -> Item:
        """The content part with the text so far."""

    def _parts(self) -> list[Item]:
        return [self._part()] if self._has_part else []

    def _place(self, output_index: int) -> JSONObject:
        return {"item_id": self.id, "output_index": output_index, "content_index": 0}

    def begin(self, output_index: int) -> Iterator[Event]:
        """The events after `response.output_item.added`."""
        self._has_part = True
        yield "response.content_part.added", self._place(output_index) | {"part": self._part()}

    def end(self, output_index: int) -> Iterator[Event]:
        """The events before `response.output_item.done`."""
        place, part = self._place(output_index), self._part()
        fields = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield f"{self._text_event}.done", place | fields
        yield "response.content_part.done", place | {"part": part}


class MessageItem(_TextItem):
    """A message of the model."""

    def __init__(self) -> None:
        super().__init__("message", "response.output_text")
        self._logprobs: list[dict[str, object]] = []

    def as_object(self, status: str) -> Item:
        """The message so far."""
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": self._parts()}

    def add(self, output_index: int, text: str, logprobs: Logprobs) -> Iterator[Event]:
        self._pieces.append(text)
        self._logprobs += logprobs
        fields = {"delta": text, "logprobs": list(logprobs)}
        yield "response.output_text.delta", self._place(output_index) | fields

    def _part(self) -> Item:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class ReasoningItem(_TextItem):
    """Reasoning of the model; there is no summary, the text itself is the content."""

    def __init__(self) -> None:
        super().__init__("reasoning", "response.reasoning_text")

    def as_object(self, status: str) -> Item:
        """The reasoning so far."""
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": self._parts()}

    def add(self, output_index: int, text: str) -> Iterator[Event]:
        self._pieces.append(text)
        yield "response.reasoning_text.delta", self._place(output_index) | {"delta": text}

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": self._text}


class CallItem:
    """A function call of the model."""

    KIND, EVENT, FIELD = "function_call", "response.function_call_arguments", "arguments"

    def __init__(self, call_id: str, name: str) -> None:
        self.id = lasting(new_item_id(self.KIND))
        self._call = {"call_id": lasting(call_id), "name": name}
        self._pieces: list[str] = []

    def as_object(self, status: str) -> Item:
        """The call so far."""
        return {"id": self.id, "type": self.KIND, "status": status} | self._call | {self.FIELD: self._value}

    def begin(self, output_index: int) -> Iterator[Event]:
        """No events, since a call has no parts."""
        return iter(())

    def add(self, output_index: int, arguments: str) -> Iterator[Event]:
        self._pieces.append(arguments)
        yield f"{self.EVENT}.delta", self._place(output_index) | {"delta": arguments}

    def end(self, output_index: int) -> Iterator[Event]:
        """The event with the complete arguments."""
        fields = self._place(output_index) | {"name": self._call["name"]}
        yield f"{self.EVENT}.done", fields | {"arguments": self._value}

    @property
    def _value(self) -> str:
        return "".join(self._pieces)

    def _place(self, output_index: int) -> JSONObject:
        return {"item_id": self.id, "output_index": output_index}


class CustomCallItem(CallItem):
    """A call of a custom tool, which has one text."""

    KIND, EVENT, FIELD = "custom_tool_call", "response.custom_tool_call_input", "input"

    def __init__(self, call_id: str, name: str, *, has_arguments: bool) -> None:
        """`has_arguments`: Whether the model writes the text as an argument, so that it is known at the end."""
        super().__init__(call_id, name)
        self._has_arguments = has_arguments

    def add(self, output_index: int, arguments: str) -> Iterator[Event]:
        if not self._has_arguments:
            return super().add(output_index, arguments)
        self._pieces.append(arguments)
        return iter(())

    def end(self, output_index: int) -> Iterator[Event]:
        """The events with the complete text."""
        if self._has_arguments and self._value:
            yield f"{self.EVENT}.delta", self._place(output_index) | {"delta": self._value}
        yield f"{self.EVENT}.done", self._place(output_index) | {"input": self._value}

    @property
    def _value(self) -> str:
        return input_of(super()._value) if self._has_arguments else super()._value


class OutputBuilder:
    """Builds items from deltas: at most one is open, and a delta of another kind closes it."""

    def __init__(self, custom_names: Container[str] = (), *, has_arguments: bool = True) -> None:
        """`custom_names`: The custom tools; `has_arguments` as in `CustomCallItem`."""
        self._custom_names, self._has_arguments = custom_names, has_arguments
        self._done: list[Item] = []
        self._open: MessageItem | ReasoningItem | CallItem | None = None
        self._call_index: int | None = None

    def items(self, status: str = "in_progress") -> list[Item]:
        """All items so far; `status` is that of the open one."""
        return [*self._done, *([] if self._open is None else [self._open.as_object(status)])]

    def add(self, delta: ChatDelta, logprobs: Logprobs = ()) -> Iterator[Event]:
        """The events of a delta; the end of an open call comes before its text.

        `logprobs`: Those of the text, or of final tokens without text.
        """
        calls = deque(delta.tool_calls)
        while calls and calls[0].id is None:
            yield from self._add_call(calls.popleft())
        if delta.reasoning:
            yield from self._add_reasoning(delta.reasoning)
        if delta.content or (logprobs and isinstance(self._open, MessageItem)):
            yield from self._add_text(delta.content, logprobs)
        for call in calls:
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Closes the open item as `completed` or `incomplete`; an output without items gets an empty message."""
        if not self._done and self._open is None:
            yield from self._begin(MessageItem())
        yield from self._close(status)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem()
            yield from self._begin(item)
        yield from item.add(len(self._done), text)

    def _add_text(self, text: str, logprobs: Logprobs) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, MessageItem):
            item = MessageItem()
            yield from self._begin(item)
        yield from item.add(len(self._done), text, logprobs)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, CallItem) or call.index != self._call_index:
            item = self._new_call(call.id or "", call.name or "")
            yield from self._begin(item)
            self._call_index = call.index
        if call.arguments:
            yield from item.add(len(self._done), call.arguments)

    def _new_call(self, call_id: str, name: str) -> CallItem:
        if name in self._custom_names:
            return CustomCallItem(call_id, name, has_arguments=self._has_arguments)
        return CallItem(call_id, name)

    def _begin(self, item: MessageItem | ReasoningItem | CallItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        index = len(self._done)
        yield "response.output_item.added", {"output_index": index, "item": item.as_object("in_progress")}
        yield from item.begin(index)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        index, item = len(self._done), self._open
        yield from item.end(index)
        done = item.as_object(status)
        self._done.append(done)
        self._open = None
        yield "response.output_item.done", {"output_index": index, "item": done}
