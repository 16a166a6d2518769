"""The events of a step log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from llmstack_types import EngineCoreRequest, PrefixMedia
from llmstack_types.media import NO_MEDIA


class Tag(IntEnum):
    """The first byte of a record."""

    ADD = 1
    ABORT = 2
    SCHEDULE = 3
    UPDATE = 4
    RESET_PREFIX_CACHE = 5
    CHECKPOINT = 6
    GAP = 7
    FORK = 8
    IMPORT = 9
    MARK = 10
    SNAPSHOT = 11
    IMPORT_WITH_MEDIA = 12
    NUMERICS = 13
    RELEASE = 14


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """A request was queued, or refused: the scheduler says which."""

    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class RequestForked:
    """A request was to go on from where another one is, or was refused: the scheduler says which."""

    parent_id: str
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """Requests were ended, in this order."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """A step was asked for."""

    now_us: int


@dataclass(frozen=True, slots=True)
class StepUpdated:
    """The results of a step.

    Attributes:
        lag: How many steps have been scheduled since the one that this is about; 0 is the last one.
        sampled_token_ids: Per row of that step.
        errors: Request id to what went wrong with its row.
    """

    now_us: int
    lag: int
    sampled_token_ids: list[list[int]]
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """A request to forget cached prefixes."""


@dataclass(frozen=True, slots=True)
class SessionsReleased:
    """The sessions of a tenant that have a name were given up."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class PrefixImported:
    """Another engine core's blocks became part of the prefix cache: those of these tokens, as far as they are new."""

    token_ids: list[int]
    salt: str = ""
    media: PrefixMedia = NO_MEDIA


@dataclass(frozen=True, slots=True)
class NumericsChanged:
    """From here on results depend on this, in place of `LogHeader.numerics`: the weights are others."""

    numerics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Proof of everything before it.

    Attributes:
        num_steps: Steps scheduled so far.
        digest: The running hash of the decisions so far.
        is_closed: Whether the run ended here in good order.
    """

    num_steps: int
    digest: bytes
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """The moment of a snapshot, which is written later. The running hash goes on from its value here.

    Attributes:
        num_steps: Steps scheduled so far.
        state_digest: The hash of the state, where the log has the snapshot.
    """

    num_steps: int
    state_digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """A snapshot of an earlier moment: nothing happens here."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The ring has let go of what stood here."""

    num_steps: int


Event = (
    RequestAdded
    | RequestForked
    | RequestsAborted
    | StepScheduled
    | StepUpdated
    | PrefixCacheReset
    | SessionsReleased
    | PrefixImported
    | NumericsChanged
    | Checkpoint
    | Marked
    | Snapshotted
    | Gap
)
