"""`kv_transfer_params`: prompts that one server computes and another goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llmstack_llm import RequestOutput, request_errors
from llmstack_server.state.repeated_outputs import OutputsThrough
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.fields import GenerationFields
from llmstack_server.web.unsupported import unsupported
from llmstack_types import KVTransferParams

PARAM: Final = "kv_transfer_params"
MAX_ID_CHARS: Final = 128
MAX_NUM_TOKENS: Final = 2**31 - 1
# What vLLM's proxies send as null, and what other connectors need.
_OTHERS: Final = ("remote_block_ids", "remote_host", "remote_port", "remote_request_id", "tp_size")
_TYPES: Final = {bool: "a boolean", str: "a string", int: "an integer"}


def read_kv_transfer(
    state: ServerState, given: Mapping[str, object], fields: GenerationFields, num_prompts: int = 1
) -> KVTransferParams | None:
    """The parameters of a request; None where it asks for no transfer.

    Raises:
        InvalidRequestError: The server does not do it, or they cannot be used as they stand.
    """
    config = state.config.engine.kv_transfer_config
    if config is None:
        raise unsupported(PARAM)
    values = {
        name: _value(name, given.get(name), default) for name, default in KVTransferParams._field_defaults.items()
    }
    for name, value in given.items():
        if name not in values and (name not in _OTHERS or value is not None):
            raise request_errors.invalid_value(f"{PARAM}.{request_errors.echo(name)}", "there is no such parameter")
    params = KVTransferParams(**values)
    if not params.do_remote_decode and not params.do_remote_prefill:
        return None
    _check_use(params, config["kv_role"], fields, num_prompts)
    return params


def _value(name: str, value: object, default: object) -> Any:
    if value is None:
        return default
    if type(value) is not type(default):
        raise request_errors.invalid_type(f"{PARAM}.{name}", _TYPES[type(default)], value)
    if isinstance(value, str) and len(value) > MAX_ID_CHARS:
        raise request_errors.string_too_long(f"{PARAM}.{name}", MAX_ID_CHARS, len(value))
    if type(value) is int and not 0 <= value <= MAX_NUM_TOKENS:
        raise request_errors.invalid_value(f"{PARAM}.{name}", f"expected 0 to {MAX_NUM_TOKENS}")
    return value


def _check_use(params: KVTransferParams, role: str, fields: GenerationFields, num_prompts: int) -> None:
    if params.do_remote_decode and params.do_remote_prefill:
        raise request_errors.invalid_value(PARAM, "a request asks for one of do_remote_decode and do_remote_prefill")
    if role == ("kv_consumer" if params.do_remote_decode else "kv_producer"):
        name = "do_remote_decode" if params.do_remote_decode else "do_remote_prefill"
        raise request_errors.unsupported_value(PARAM, f"this server is a {role}, which does not offer {name}")
    if num_prompts > 1 or (fields.n or 1) > 1 or (fields.best_of or 1) > 1 or fields.use_beam_search:
        raise request_errors.invalid_value(PARAM, "only requests with one prompt and one completion are transferred")
    if params.do_remote_decode and fields.stream:
        raise request_errors.invalid_value(PARAM, "with do_remote_decode the answer is whole; 'stream' must be false")


class NotedTransfer(OutputsThrough):
    """The outputs of a request whose prompt is exported. What is exported comes with the last output.

    Attributes:
        kv_transfer_params: The field for the request to the other server; None if nothing was exported.
    """

    kv_transfer_params: Mapping[str, Any] | None = None

    async def __anext__(self) -> RequestOutput:
        output = await super().__anext__()
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        return output
