"""Journal of a background response, from which another server finishes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmstack_server.web.sse import encode_json


@dataclass(frozen=True, slots=True)
class Journal:
    """The request of an unfinished response.

    Attributes:
        body: Its JSON with the seed and without the input, which the store has as items.
        created_at: When the response was made, in seconds since 1970.
        identity: As of `identity_of`: with another one the events would not be the same.
        num_resumes: How many servers have begun it again.
    """

    body: dict[str, Any]
    created_at: int
    identity: str
    num_resumes: int = 0

    def encoded(self) -> bytes:
        """The journal as JSON."""
        fields = {"body": self.body, "created_at": self.created_at, "identity": self.identity}
        return encode_json(fields | {"num_resumes": self.num_resumes}).encode("utf-8", "replace")


def decode_journal(data: bytes) -> Journal:
    """The journal in its stored form.

    Raises:
        ValueError: It is not one.
    """
    match json.loads(data):
        case {"body": dict(body), "created_at": int(at), "identity": str(identity), "num_resumes": int(num_resumes)}:
            return Journal(body, at, identity, num_resumes)
        case _:
            raise ValueError("the journal is malformed")
