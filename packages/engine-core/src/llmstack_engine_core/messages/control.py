"""Declaration of `ControlCall` and `ControlResult`.

Each operation has kinds for its arguments and for its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from llmstack_engine_core.messages.kinds import BOOLEAN, COUNT, CodecError, Kind, blob, integer, list_of, text
from llmstack_engine_core.messages.outputs import STATS
from llmstack_engine_core.messages.recent_steps import RECENT_STEPS
from llmstack_engine_core.messages.requests import MAX_LORA_NAME_LENGTH
from llmstack_engine_core.messages.rows import Row
from llmstack_types import Control, Operation

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

    result: Kind
    arguments: tuple[Kind, ...] = ()


_ADAPTER: Final = text(MAX_LORA_NAME_LENGTH, 1)

SIGNATURES: Final[dict[AnyOperation, Signature]] = {
    Control.RESET_PREFIX_CACHE: Signature(BOOLEAN),
    Control.STATS: Signature(STATS),
    Control.SHUTDOWN: Signature(BOOLEAN),
    Control.RECENT_STEPS: Signature(RECENT_STEPS, (COUNT,)),
    Control.STEP_LOG: Signature(blob()),
    Control.SLEEP: Signature(BOOLEAN, (integer(1, 2),)),
    Control.WAKE_UP: Signature(BOOLEAN),
    Control.SLEEP_LEVEL: Signature(integer(0, 2)),
    Control.LOAD_ADAPTER: Signature(text(), (_ADAPTER, text(4096, 1))),
    Control.UNLOAD_ADAPTER: Signature(BOOLEAN, (_ADAPTER,)),
    Control.START_PROFILE: Signature(text()),
    Control.STOP_PROFILE: Signature(text()),
}
_NUMBER_TO_OPERATION: Final = {operation.number: operation for operation in SIGNATURES}


def _operation(value: Any) -> AnyOperation:
    operation = _NUMBER_TO_OPERATION.get(COUNT.unpack(value, "operation"))
    if operation is None:
        raise CodecError("the message has an unknown operation")
    return operation


def _arguments(operation: AnyOperation, values: Any) -> tuple[Any, ...]:
    kinds = SIGNATURES[operation].arguments
    if type(values) is not list or len(values) != len(kinds):
        raise CodecError(f"{operation.name} has {len(kinds)} arguments")
    return tuple(kind.unpack(value, operation.name) for kind, value in zip(kinds, values, strict=True))


def _pack_call(call: ControlCall, name: str) -> list[Any]:
    return [call.call_id, call.operation.number, _arguments(call.operation, [*call.arguments])]


def _unpack_call(value: Any, name: str) -> ControlCall:
    call_id, number, arguments = list_of(value, name, 3)
    operation = _operation(number)
    return ControlCall(COUNT.unpack(call_id, "call_id"), operation, _arguments(operation, arguments))


def _draw_call(pick: Random) -> ControlCall:
    operation, (_, kinds) = pick.choice(list(SIGNATURES.items()))
    return ControlCall(COUNT.draw(pick), operation, tuple(kind.draw(pick) for kind in kinds))


def _pack_result(result: ControlResult, name: str) -> list[Any]:
    value = SIGNATURES[result.operation].result.pack(result.value, result.operation.name)
    return [result.call_id, result.operation.number, value]


def _unpack_result(value: Any, name: str) -> ControlResult:
    call_id, number, packed = list_of(value, name, 3)
    operation = _operation(number)
    found = SIGNATURES[operation].result.unpack(packed, operation.name)
    return ControlResult(COUNT.unpack(call_id, "call_id"), operation, found)


def _draw_result(pick: Random) -> ControlResult:
    operation, (kind, _) = pick.choice(list(SIGNATURES.items()))
    return ControlResult(COUNT.draw(pick), operation, kind.draw(pick))


CALL: Final = Row(_unpack_call, _draw_call, _pack_call, cls=ControlCall)
RESULT: Final = Row(_unpack_result, _draw_result, _pack_result, cls=ControlResult)
