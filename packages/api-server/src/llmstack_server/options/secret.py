"""A value that never shows itself in a log, a trace or `/server_info`."""

from __future__ import annotations

from collections.abc import Sequence


class Secret:
    """One secret text, kept as its SHA-256 digest only."""

    __slots__ = ("_digest",)

    def __init__(self, text: str) -> None:
        self._digest = _sha256(text.encode())

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def digest(self) -> str:
        """The digest in hexadecimal digits, from which `from_digest` makes the secret in another process."""
        return self._digest.hex()

    @classmethod
    def from_digest(cls, digest: str) -> Secret:
        """The inverse of `digest`."""
        secret = cls.__new__(cls)
        secret._digest = bytes.fromhex(digest)
        return secret

    def matches(self, candidate: bytes) -> bool:
        """Compares in constant time; digests have equal lengths, so a key's length does not show either."""
        import hmac  # late: `--help` has no secrets

        return hmac.compare_digest(self._digest, _sha256(candidate))


def _sha256(data: bytes) -> bytes:
    import hashlib  # late, as `hmac`: it loads OpenSSL

    return hashlib.sha256(data).digest()


def matching_index(secrets: Sequence[Secret], candidate: bytes) -> int | None:
    """The place of `candidate` in `secrets`; all are compared, so the time does not tell which it is."""
    found = None
    for index, secret in enumerate(secrets):
        found = index if secret.matches(candidate) else found
    return found


def tenant_ids(keys: Sequence[Secret], deployment_secret: bytes) -> tuple[str, ...]:
    """An opaque id of each key, which all processes and hosts with the same deployment secret agree on."""
    import hmac  # late, as in `matches`

    return tuple(hmac.digest(deployment_secret, key._digest, "sha256")[:16].hex() for key in keys)
