"""Identity of LoRA adapters."""

from __future__ import annotations

from typing import NamedTuple


class LoRAIdentity(NamedTuple):
    """The identity of an adapter: two adapters with equal identities compute the same.

    As text (`str`) it is the `lora_name` of requests: `name@digest.generation`. A name has no `@`.

    Attributes:
        name: Its name for clients.
        digest: Hexadecimal digest of its files' content.
        generation: Number of the load: one that is loaded again has another, so nothing computed before serves it.
    """

    name: str
    digest: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}.{self.generation}"

    @classmethod
    def parse(cls, text: str) -> LoRAIdentity:
        """The inverse of `str`.

        Raises:
            ValueError: The text is no identity.
        """
        name, _, rest = text.partition("@")
        digest, _, generation = rest.partition(".")
        if not (name and digest and generation.isascii() and generation.isdigit()):
            raise ValueError(f"{text[:64]!r} is no identity of an adapter")
        return cls(name, digest, int(generation))
