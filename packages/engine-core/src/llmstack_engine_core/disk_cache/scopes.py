"""Names and keys of blocks on disk: one scope for each client, model and adapter."""

from __future__ import annotations

import hmac
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from llmstack_engine_core.disk_cache.block_files import BlockMissError

MAGIC: Final = b"llmstackKV1\n"
DIGEST_BYTES: Final = 32
_NONCE_BYTES: Final = 12
SEAL_BYTES: Final = len(MAGIC) + _NONCE_BYTES + 16
"""By how much a sealed text is longer; 16 bytes are the tag of AES-GCM."""
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True, repr=False)
class Scope:
    """The blocks of one scope: those that requests with the same facts share. No other scope has its names or keys.

    Attributes:
        facts: Everything that the values in a block depend on besides tokens, and whose they are.
        name_key: Of the names.
        seal_key: From which the key of each name derives.
    """

    facts: bytes
    name_key: bytes
    seal_key: bytes

    @classmethod
    def of(cls, secret: bytes, facts: bytes) -> Scope:
        """The scope of `facts`, with keys derived from the secret of the folder."""
        keys = HKDF(SHA256(), 2 * DIGEST_BYTES, salt=None, info=b"llmstack KV cache on disk\0" + facts).derive(secret)
        return cls(facts, keys[:DIGEST_BYTES], keys[DIGEST_BYTES:])

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


class Chain:
    """The whole blocks of one text, each named by all tokens up to its end.

    Attributes:
        num_blocks: How many there are.
    """

    def __init__(self, scope: Scope, block_size: int, token_ids: Sequence[int]) -> None:
        self._scope = scope
        self._block_bytes = _TOKEN_BYTES * block_size
        self._tokens = array("I", token_ids).tobytes()
        self.num_blocks = len(self._tokens) // self._block_bytes
        self._digests = [scope.digest(b"root")]
        for number in range(self.num_blocks):
            self._digests.append(scope.digest(self._digests[-1] + self.tokens(number, number + 1)))

    @property
    def scope(self) -> Scope:
        """The scope of its names."""
        return self._scope

    def tokens(self, start: int, end: int) -> bytes:
        """The tokens of some blocks, packed."""
        return self._tokens[start * self._block_bytes : end * self._block_bytes]

    def head(self, start: int, end: int) -> bytes:
        """What blocks are, exactly: the digest of what is before them, and their tokens."""
        return self._digests[start] + self.tokens(start, end)

    def name(self, end: int) -> str:
        """The name of the blocks that end with number `end`."""
        return self._digests[end].hex()

    def state_name(self, end: int) -> str:
        """The name of the state after the first `end` blocks."""
        return self._scope.digest(b"state" + self._digests[end]).hex()
