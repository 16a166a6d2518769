"""Messages from the engine core's rank to the others, and their answers.

The epoch is a random number of one start of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Final

from llmstack_engine_core.messages.kinds import UINT32S, Kind, blob, counters, items, lists, member, shortened, text
from llmstack_engine_core.messages.message_set import MessageSet
from llmstack_engine_core.messages.outputs import REQUEST_IDS
from llmstack_engine_core.messages.rows import row
from llmstack_engine_core.messages.steps import STEP
from llmstack_types import SchedulerOutput, TokenMasks

VERSION: Final = 6
MAX_FRAME_BYTES: Final = 256 * 2**20
MAX_EPOCH: Final = 2**64 - 1
_ADDRESS: Final = text(256)
_BYTES: Final = blob()
_COUNTERS: Final = counters()
_MASKS: Final = row(
    TokenMasks,
    {
        "request_ids": REQUEST_IDS,
        "bits": Kind(
            lambda value, name: bytearray(_BYTES.unpack(value, name)),
            lambda pick: bytearray(_BYTES.draw(pick)),
            lambda value, name: bytes(value),
        ),
    },
)


class Call(IntEnum):
    """Methods of a model runner that all ranks are asked for at once; each rank answers."""

    LOAD_MODEL = 1
    AVAILABLE_KV_BYTES = 2
    INITIALIZE_KV_CACHE = 3
    SLEEP = 4
    WAKE_UP = 5
    END = 6


class AdapterCall(IntEnum):
    """An operation on a LoRA adapter in all ranks."""

    READ = 1
    """Begins to read it beside steps; there is no answer."""

    ADD = 2
    """Makes it available; each rank answers when it has read it."""

    REMOVE = 3
    """Drops it; there is no answer."""


@dataclass(frozen=True, slots=True)
class CallMessage:
    """A method to call, with numbers as arguments."""

    call: Annotated[Call, member(Call)]
    arguments: Annotated[tuple[int, ...], _COUNTERS] = ()


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One step.

    Attributes:
        number: Counts the steps of this epoch.
        has_masks: A `MasksMessage` follows for the ranks that sample.
        sampled: The tokens of the rows of earlier steps, in the order of the steps; for stages that do not sample.
    """

    number: int
    scheduled: Annotated[SchedulerOutput, STEP]
    has_masks: bool = False
    sampled: Annotated[Sequence[Sequence[Sequence[int]]], items(lists(UINT32S))] = ()


@dataclass(frozen=True, slots=True)
class MasksMessage:
    """The masks of a step, sent when its forward pass is launched."""

    number: int
    masks: Annotated[TokenMasks, _MASKS]


@dataclass(frozen=True, slots=True)
class AdapterMessage:
    """A LoRA adapter by its identity; `path` is its folder, where it is to be read."""

    call: Annotated[AdapterCall, member(AdapterCall)]
    identity: Annotated[str, text(1024, 1)]
    path: Annotated[str, text(4096)] = ""


@dataclass(frozen=True, slots=True)
class TextsMessage:
    """The texts of tokens are to be read beside steps; or, with `is_due`, to be there, and the rank answers."""

    is_due: bool = False


@dataclass(frozen=True, slots=True)
class WeightsMessage:
    """A folder of weights to check; without a path, those checked last take the place of those in use, or give it back.

    Each rank answers.
    """

    path: Annotated[str, text(4096)] = ""


@dataclass(frozen=True, slots=True)
class BlocksMessage:
    """KV blocks to read, or to write.

    Attributes:
        block_ids: The blocks of the pool.
        first: Number of the first of these among those of the bytes.
        data: A part of the bytes; others have come before it. Empty where blocks are read.
        is_whole: It is the last part.
        state_id: The state block behind them; 0 for none.
    """

    block_ids: Annotated[tuple[int, ...], _COUNTERS]
    first: int = 0
    data: Annotated[bytes, _BYTES] = b""
    is_whole: bool = True
    state_id: int = 0


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """A part of the bytes of blocks, which follow each other."""

    data: Annotated[bytes, _BYTES]


@dataclass(frozen=True, slots=True)
class MeetMessage:
    """Message with the addresses at which ranks of several nodes find each other.

    Attributes:
        link: Where a rank listens for the stage before. A rank sends its own, and gets that of the next stage.
        store: Where ranks of torch.distributed meet; empty where they do not.
    """

    link: Annotated[str, _ADDRESS] = ""
    store: Annotated[str, _ADDRESS] = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A call was successful.

    Attributes:
        numbers: The results.
        digest: That of the weights that were updated, after a `WeightsMessage`.
    """

    numbers: Annotated[tuple[int, ...], _COUNTERS] = ()
    digest: Annotated[str, text(64)] = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call failed for a reason that the user can do something about."""

    reason: Annotated[str, shortened(4096)]
    numbers: tuple[int, ...] = field(default=(), init=False)


ToRank = (
    CallMessage | StepMessage | MasksMessage | AdapterMessage | TextsMessage | WeightsMessage | BlocksMessage
    | MeetMessage
)  # fmt: skip
Message = ToRank | Answer | Failure | BlockBytes

MESSAGES: Final[MessageSet[Message]] = MessageSet(
    "ranks",
    VERSION,
    MAX_FRAME_BYTES,
    {
        1: row(CallMessage),
        2: row(StepMessage),
        3: row(MasksMessage),
        4: row(AdapterMessage),
        5: row(MeetMessage),
        6: row(BlocksMessage),
        7: row(TextsMessage),
        8: row(WeightsMessage),
        16: row(Answer),
        17: row(Failure, absent=("numbers",)),
        18: row(BlockBytes),
    },
    max_epoch=MAX_EPOCH,
)
