"""Names and keys of blocks on disk: one scope for each client, model and adapter."""

from __future__ import annotations

import hmac
import os
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgpack  # type: ignore[import-untyped]  # it has no annotations
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from llmstack_core_scheduler.media_numbers import vector_places
from llmstack_engine_core.disk_cache.block_files import BlockMissError
from llmstack_types import MediaItem

MAGIC: Final = b"llmstackKV1\n"
DIGEST_BYTES: Final = 32
_NONCE_BYTES: Final = 12
SEAL_BYTES: Final = len(MAGIC) + _NONCE_BYTES + 16
"""By how much a sealed text is longer; 16 bytes are the tag of AES-GCM."""
_TOKEN_BYTES: Final = 4
_OWNER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, repr=False)
class Scope:
    """The blocks of one scope: those that requests with the same facts share. No other scope has its names or keys.

    Attributes:
        facts: Everything that the values in a block depend on besides tokens, and who may find them.
        name_key: Of the names.
        seal_key: From which the key of each name derives.
        owner: Whose part of the bound the files take that are written; clients who share prefixes differ in this alone.
    """

    facts: bytes
    name_key: bytes
    seal_key: bytes
    owner: str = ""

    @classmethod
    def of(cls, secret: bytes, facts: bytes, tenant: str = "") -> Scope:
        """The scope of `facts`, with keys derived from the secret of the folder, for a tenant who writes in it."""
        keys = HKDF(SHA256(), 2 * DIGEST_BYTES, salt=None, info=b"llmstack KV cache on disk\0" + facts).derive(secret)
        return cls(facts, keys[:DIGEST_BYTES], keys[DIGEST_BYTES:], owner_of(secret, tenant))

    def digest(self, text: bytes) -> bytes:
        """A name that tells nothing about the text without the secret."""
        return hmac.digest(self.name_key, text, "sha256")

    def seal(self, name: str, text: bytes | bytearray) -> list[bytes]:
        """The text encrypted for this name, in parts of which the file consists."""
        nonce = os.urandom(_NONCE_BYTES)
        return [MAGIC, nonce, self._cipher(name).encrypt(nonce, text, self._identity(name))]

    def unseal(self, name: str, sealed: bytearray) -> bytes:
        """The text that was sealed for this name.

        Raises:
            BlockMissError: Any bit is another one, or it was sealed for another name or scope.
        """
        start = len(MAGIC) + _NONCE_BYTES
        with memoryview(sealed) as view:
            try:
                if bytes(view[: len(MAGIC)]) != MAGIC:
                    raise BlockMissError("damaged")
                return self._cipher(name).decrypt(bytes(view[len(MAGIC) : start]), view[start:], self._identity(name))
            except InvalidTag:
                raise BlockMissError("damaged") from None

    def _cipher(self, name: str) -> AESGCM:
        # A key for each name: few texts are sealed by it, so that no nonce comes twice.
        return AESGCM(hmac.digest(self.seal_key, name.encode(), "sha256"))

    def _identity(self, name: str) -> bytes:
        return MAGIC + self.facts + name.encode()


def owner_of(secret: bytes, tenant: str) -> str:
    """The name of a tenant as the owner of files, which tells nothing without the secret; empty for none."""
    text = b"llmstack owner of files\0" + tenant.encode("utf-8", "surrogatepass")
    return hmac.digest(secret, text, "sha256")[:_OWNER_BYTES].hex() if tenant else ""


class Chain:
    """The whole blocks of one text, each named by all tokens and items up to its end. For any thread.

    Attributes:
        num_blocks: How many there are.
    """

    def __init__(
        self, scope: Scope, block_size: int, token_ids: Sequence[int], media: Sequence[MediaItem] = ()
    ) -> None:
        """`media`: The items whose vectors stand in place of tokens; O(tokens + blocks of items), without a digest."""
        self._scope = scope
        self._block_bytes = _TOKEN_BYTES * block_size
        self._tokens = array("I", token_ids).tobytes()
        self.num_blocks = len(self._tokens) // self._block_bytes
        self._items = _items_by_block(scope, media, block_size, self.num_blocks)
        self._digests = [scope.digest(b"root")]
        self._lock = threading.Lock()

    @property
    def scope(self) -> Scope:
        """The scope of its names."""
        return self._scope

    def tokens(self, start: int, end: int) -> bytes:
        """The tokens of some blocks, packed."""
        return self._tokens[start * self._block_bytes : end * self._block_bytes]

    def head(self, start: int, end: int) -> bytes:
        """An exact identity of blocks: the digest of all before them, their tokens, and the items among these."""
        head = self._digest(start) + self.tokens(start, end)
        if not self._items:
            return head
        return head + b"".join(self._items.get(number, b"") for number in range(start, end))

    def name(self, end: int) -> str:
        """The name of the blocks that end with number `end`."""
        return self._digest(end).hex()

    def state_name(self, end: int) -> str:
        """The name of the state after the first `end` blocks."""
        return self._scope.digest(b"state" + self._digest(end)).hex()

    def window_name(self, start: int, end: int, window: int) -> str:
        """The name of blocks from `start` to `end` of the groups with a sliding window."""
        return self._scope.digest(b"window" + msgpack.packb((window, end - start)) + self._digest(end)).hex()

    def _digest(self, end: int) -> bytes:
        """The digest of the first `end` blocks. It is made when asked for: few ever are for a prompt not on disk."""
        digests = self._digests
        if end >= len(digests):
            with self._lock:
                while end >= len(digests):
                    digests.append(self._scope.digest(self.head(len(digests) - 1, len(digests))))
        return digests[end]


def _items_by_block(scope: Scope, media: Sequence[MediaItem], block_size: int, num_blocks: int) -> dict[int, bytes]:
    """The items of each block with vectors: a digest of all facts of each, and its place."""
    found: dict[int, list[tuple[bytes, int]]] = {}
    for item in media:
        runs = [(places.start // block_size, -(-places.stop // block_size)) for places in vector_places(item)]
        numbers = {number for start, end in runs for number in range(start, min(end, num_blocks))}
        facts = (item.digest, item.kind, item.num_tokens, item.embed_runs, item.layout, item.num_units)
        digest = scope.digest(b"item" + msgpack.packb(facts)) if numbers else b""
        for number in numbers:
            found.setdefault(number, []).append((digest, item.offset))
    return {number: msgpack.packb(items) for number, items in found.items()}
