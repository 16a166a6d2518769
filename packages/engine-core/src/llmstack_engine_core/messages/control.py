"""Declaration of `ControlCall` and `ControlResult`.

Each operation has kinds for its arguments and for its result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, NamedTuple

from llmstack_engine_core.messages.kinds import BOOLEAN, COUNT, CodecError, Kind, blob, integer, list_of, text, word
from llmstack_engine_core.messages.outputs import STATS
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_engine_core.messages.requests import MAX_LORA_NAME_LENGTH, SESSION, TENANT
from llmstack_engine_core.messages.rows import Row, tuple_of
from llmstack_types import Control, Operation
from llmstack_types.log_lines import LOG_LEVELS

AnyOperation = Operation[Any, *tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Asks for one operation of `Control`; the result has the same `call_id`."""

    call_id: int
    operation: AnyOperation
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The answer to a `ControlCall`; `value` has the result type of `operation`."""

    call_id: int
    operation: AnyOperation
    value: Any


class Signature(NamedTuple):
    """The kinds of an operation's result and of its arguments."""

    value: Kind
    arguments: Kind


def _signature(result: Kind, *arguments: Kind) -> Signature:
    each = tuple_of(*arguments)  # which the sender checks too
    return Signature(result, replace(each, pack=lambda value, name: each.unpack([*value], name)))


def _three_texts() -> Kind:
    texts = tuple_of(text(), text(), text())
    return replace(texts, pack=lambda value, name: list(texts.unpack([*value], name)))


def _two_counts() -> Kind:
    counts = tuple_of(COUNT, COUNT)
    return replace(counts, pack=lambda value, name: list(counts.unpack([*value], name)))


_ADAPTER: Final = text(MAX_LORA_NAME_LENGTH, 1)

SIGNATURES: Final[dict[AnyOperation, Signature]] = {
    Control.RESET_PREFIX_CACHE: _signature(BOOLEAN),
    Control.STATS: _signature(STATS),
    Control.SHUTDOWN: _signature(BOOLEAN),
    Control.RECENT_STEPS: _signature(RECENT_STEPS, COUNT),
    Control.STEP_LOG: _signature(blob()),
    Control.SLEEP: _signature(BOOLEAN, integer(1, 2)),
    Control.WAKE_UP: _signature(BOOLEAN),
    Control.SLEEP_LEVEL: _signature(integer(0, 2)),
    Control.LOAD_ADAPTER: _signature(text(), _ADAPTER, text(4096, 1)),
    Control.UNLOAD_ADAPTER: _signature(BOOLEAN, _ADAPTER),
    Control.START_PROFILE: _signature(text()),
    Control.STOP_PROFILE: _signature(text()),
    Control.UPDATE_WEIGHTS: _signature(_three_texts(), text(4096, 1)),
    Control.RELEASE_SESSIONS: _signature(_two_counts(), TENANT, SESSION),
    Control.SET_LOG_LEVEL: _signature(BOOLEAN, word(LOG_LEVELS)),
}
_NUMBER_TO_OPERATION: Final = {operation.number: operation for operation in SIGNATURES}


def _row(cls: type[Any], last: str) -> Row:
    """A call or a result, whose last field is of the kind that its operation says."""

    def unpack(value: object, name: str) -> object:
        call_id, number, packed = list_of(value, name, 3)
        operation = _NUMBER_TO_OPERATION.get(COUNT.unpack(number, "operation"))
        if operation is None:
            raise CodecError("the message has an unknown operation")
        found = getattr(SIGNATURES[operation], last).unpack(packed, operation.name)
        return cls(COUNT.unpack(call_id, "call_id"), operation, found)

    def pack(message: Any, name: str) -> list[Any]:
        operation = message.operation
        value = getattr(SIGNATURES[operation], last).pack(getattr(message, last), operation.name)
        return [message.call_id, operation.number, value]

    def draw(pick: Random) -> object:
        operation, signature = pick.choice([*SIGNATURES.items()])
        return cls(COUNT.draw(pick), operation, getattr(signature, last).draw(pick))

    return Row(unpack, draw, pack, cls=cls)


CALL: Final = _row(ControlCall, "arguments")
RESULT: Final = _row(ControlResult, "value")
