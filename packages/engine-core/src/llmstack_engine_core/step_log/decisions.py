"""Decisions in one canonical form, and the running hash over them."""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter, itemgetter
from typing import Any, Final

from llmstack_engine_core.step_log.packing import pack, packed_ints, unpack
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, NewRequest, SchedulerOutput

DIGEST_SIZE: Final = 16

SCHEDULED: Final = "scheduled"
UPDATED: Final = "updated"
REFUSED: Final = "refused"
RESET: Final = "reset"

_NEW_REQUESTS: Final = "new_requests"
_STEP_FIELDS: Final = tuple(field.name for field in fields(SchedulerOutput) if field.name != _NEW_REQUESTS)
_STEP_VALUES: Final = attrgetter(*_STEP_FIELDS)
# Log-probabilities pass through the scheduler and decide nothing.
OUTPUT_FIELDS: Final = tuple(name for name in EngineCoreOutput._fields if name not in ("logprobs", "prompt_logprobs"))
_OUTPUT_VALUES: Final = itemgetter(*(EngineCoreOutput._fields.index(name) for name in OUTPUT_FIELDS))


def pack_scheduled(scheduled: SchedulerOutput) -> bytes:
    """A step, canonically: what is empty is left out, so that a later field changes nothing while it is not used."""
    named = zip(_STEP_FIELDS, _STEP_VALUES(scheduled), strict=True)
    decided: dict[str, Any] = {name: value for name, value in named if value}
    if scheduled.new_requests:
        decided[_NEW_REQUESTS] = [_new_request(request) for request in scheduled.new_requests]
    return pack([SCHEDULED, decided])


def _new_request(request: NewRequest) -> list[Any]:
    return [request.request_id, request.num_prompt_tokens, packed_ints(request.token_ids)]


def pack_updated(outputs: EngineCoreOutputs) -> bytes:
    """What a step brought its requests, canonically."""
    return pack([UPDATED, list(map(_OUTPUT_VALUES, outputs.outputs))])


def pack_refused(request_id: str) -> bytes:
    """That a request was refused; the wording of why is no decision."""
    return pack([REFUSED, request_id])


def pack_reset(is_done: bool) -> bytes:
    """Whether cached prefixes were forgotten."""
    return pack([RESET, is_done])


def unpack_decision(packed: bytes) -> tuple[str, Any]:
    """The kind of a packed decision, and what it holds."""
    kind, decided = unpack(packed, list)
    return kind, decided


class DecisionHash:
    """A running hash over packed decisions: equal hashes mean equal decisions, on any machine."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_SIZE)

    def add(self, packed: bytes) -> None:
        """Takes in one decision."""
        self._hash.update(len(packed).to_bytes(4, "little"))
        self._hash.update(packed)

    def digest(self) -> bytes:
        """The hash of all decisions so far."""
        return self._hash.digest()
