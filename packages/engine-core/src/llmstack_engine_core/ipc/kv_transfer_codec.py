"""Encoding of `KVTransferParams`, of requests and outputs."""

from __future__ import annotations

from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_types import KVTransferParams

MAX_ID_LENGTH: Final = 128
_ID = fields.text(MAX_ID_LENGTH)
_NUM_TOKENS = fields.integer(0, 2**31 - 1)


def encode_kv_transfer(params: KVTransferParams) -> list[Any]:
    """The fields, in the order of the class."""
    return list(params)


def decode_kv_transfer(value: Any, name: str) -> KVTransferParams | None:
    """The inverse of `encode_kv_transfer`."""
    if value is None:
        return None
    decode, prefill, engine_id, transfer_id, num_tokens = fields.row(value, name, len(KVTransferParams._fields))
    return KVTransferParams(
        fields.boolean(decode, name),
        fields.boolean(prefill, name),
        _ID(engine_id, name),
        _ID(transfer_id, name),
        _NUM_TOKENS(num_tokens, name),
    )


def decode_kv_transfers(value: Any, name: str) -> list[KVTransferParams | None]:
    """Decodes the KV transfers of several outputs."""
    if type(value) is not list:
        raise CodecError(f"{name} must be a list")
    return [decode_kv_transfer(item, name) for item in value]
