"""Encoding of `ControlCall` and `ControlResult`.

The arguments and the result of each operation are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import ControlCall, ControlResult
from llmstack_engine_core.ipc.outputs_codec import decode_stats
from llmstack_engine_core.ipc.recording_codec import decode_recent_steps, encode_recent_steps
from llmstack_types import Control, Operation

AnyOperation = Operation[Any, *tuple[Any, ...]]

_CALL_ID: Final = fields.integer()
_NUMBER: Final = fields.integer()
_LEVEL: Final = fields.integer(0, 2)


def _same(value: Any) -> Any:
    return value


def _bytes(value: Any, name: str) -> bytes:
    if type(value) is not bytes:
        raise CodecError(f"{name} must be bytes")
    return value


@dataclass(frozen=True, slots=True)
class _Signature:
    """How the values of one operation travel.

    Attributes:
        check_result: From a decoded value to the result; raises `CodecError`.
        encode_result: From the result to a value that msgpack carries.
        arguments: One check for each argument.
    """

    check_result: fields.Check
    encode_result: Callable[[Any], Any] = _same
    arguments: tuple[fields.Check, ...] = ()


SIGNATURES: Final[dict[AnyOperation, _Signature]] = {
    Control.RESET_PREFIX_CACHE: _Signature(fields.boolean),
    Control.STATS: _Signature(lambda value, _: decode_stats(value), list),
    Control.SHUTDOWN: _Signature(fields.boolean),
    Control.RECENT_STEPS: _Signature(
        lambda value, _: decode_recent_steps(value), encode_recent_steps, arguments=(fields.integer(),)
    ),
    Control.STEP_LOG: _Signature(_bytes),
    Control.SLEEP: _Signature(fields.boolean, arguments=(fields.integer(1, 2),)),
    Control.WAKE_UP: _Signature(fields.boolean),
    Control.SLEEP_LEVEL: _Signature(_LEVEL),
    Control.LOAD_ADAPTER: _Signature(fields.text(), arguments=(fields.text(1024, 1), fields.text(4096, 1))),
    Control.UNLOAD_ADAPTER: _Signature(fields.boolean, arguments=(fields.text(1024, 1),)),
    Control.START_PROFILE: _Signature(fields.text()),
    Control.STOP_PROFILE: _Signature(fields.text()),
}
_NUMBER_TO_OPERATION: Final = {operation.number: operation for operation in SIGNATURES}


def encode_control_call(call: ControlCall) -> list[Any]:
    """The fields of a call.

    Raises:
        CodecError: The arguments are not those of the operation.
    """
    return [call.call_id, call.operation.number, list(_checked_arguments(call.operation, list(call.arguments)))]


def decode_control_call(values: list[Any]) -> ControlCall:
    """The inverse of `encode_control_call`."""
    operation = _operation(values[1])
    return ControlCall(_CALL_ID(values[0], "call_id"), operation, _checked_arguments(operation, values[2]))


def encode_control_result(result: ControlResult) -> list[Any]:
    """The fields of a result."""
    return [result.call_id, result.operation.number, SIGNATURES[result.operation].encode_result(result.value)]


def decode_control_result(values: list[Any]) -> ControlResult:
    """The inverse of `encode_control_result`."""
    operation = _operation(values[1])
    value = SIGNATURES[operation].check_result(values[2], operation.name)
    return ControlResult(_CALL_ID(values[0], "call_id"), operation, value)


def _operation(value: Any) -> AnyOperation:
    operation = _NUMBER_TO_OPERATION.get(_NUMBER(value, "operation"))
    if operation is None:
        raise CodecError("the message has an unknown operation")
    return operation


def _checked_arguments(operation: AnyOperation, values: Any) -> tuple[Any, ...]:
    checks = SIGNATURES[operation].arguments
    if type(values) is not list or len(values) != len(checks):
        raise CodecError(f"{operation.name} has {len(checks)} arguments")
    return tuple(check(value, operation.name) for check, value in zip(checks, values, strict=True))
