"""The tag of an export: what its bytes are, and to which client they belong."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgpack  # type: ignore[import-untyped]  # it has no annotations

from llmstack_types import EngineCoreRequest, EngineReady, LoRAIdentity

LAYOUT: Final = "layer, key or value, block, kv_head, slot, dim; then a state; version 2"
"""Form of the bytes; another order needs another text."""

_OWNERS: Final = ("tenant", "cache salt")
"""A difference in these is never named: another client must not learn that there is such an export."""
_NAMES: Final = (
    *_OWNERS, "layout", "numeric contract", "block size", "dtype", "KV cache dtype", "bytes per block",
    "bytes per state", "adapter", "token ids",
)  # fmt: skip


class KVTransferError(Exception):
    """Blocks could not be imported; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class TagMaker:
    """Makes the tags of one engine core.

    Attributes:
        ready: The description of the engine core.
        bytes_per_block: The size of a block of the KV storage.
        bytes_per_state: The size of a state block; 0 for a model without states.
        form: The differences between the bytes and the canonical form.
    """

    ready: EngineReady
    bytes_per_block: int
    bytes_per_state: int = 0
    form: str = ""

    def tag(self, request: EngineCoreRequest, num_tokens: int) -> bytes:
        """The tag of the request's first `num_tokens` tokens."""
        return _packed([request.tenant, *self._facts(request), pack_tokens(request.prompt_token_ids[:num_tokens])])

    def facts(self, request: EngineCoreRequest, form: str) -> bytes:
        """The facts besides tokens that the request's blocks depend on; `form` says more about them.

        Of two requests with equal facts each may find the blocks of the other one.
        """
        return _packed([form, *self._facts(request)])

    def num_bytes(self, num_tokens: int) -> int:
        """Size of the blocks of so many tokens, and of the state after them."""
        return num_tokens // self.ready.block_size * self.bytes_per_block + self.bytes_per_state

    def _facts(self, request: EngineCoreRequest) -> list[object]:
        ready, adapter = self.ready, ""
        if request.lora_name is not None:
            identity = LoRAIdentity.parse(request.lora_name)
            adapter = f"{identity.name}@{identity.digest}"  # each engine core counts generations for itself
        return [
            request.cache_salt, LAYOUT + self.form, ready.numeric_contract_id, ready.block_size, ready.dtype,
            ready.kv_cache_dtype, self.bytes_per_block, self.bytes_per_state, adapter,
        ]  # fmt: skip


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The token ids themselves, since a hash could collide."""
    return array("I", token_ids).tobytes()


def difference(exported: bytes, wanted: bytes) -> str | None:
    """The difference between two tags; None if they are equal, empty if they belong to different clients."""
    if exported == wanted:
        return None
    ours, theirs = _values(exported), _values(wanted)
    if len(ours) != len(theirs):
        return ""
    for name, first, other in zip(_NAMES, ours, theirs, strict=False):
        if first != other:
            return "" if name in _OWNERS else name
    return ""


def _packed(values: list[object]) -> bytes:
    packed: bytes = msgpack.packb(values, unicode_errors="surrogatepass")
    return packed


def _values(tag: bytes) -> list[object]:
    try:
        values = msgpack.unpackb(tag, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException):
        return []
    return values if isinstance(values, list) else []
