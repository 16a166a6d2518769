"""The control operations of an engine core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar, TypeVarTuple

from llmstack_types.events import StepRecording
from llmstack_types.stats import SchedulerStats

ResultT = TypeVar("ResultT")
ArgumentTs = TypeVarTuple("ArgumentTs")

Merged = Literal["all", "any", "max", "first", "first text", "lines", "slowest", "sums"]
"""The result of the first engine core, its first text that is not empty, the lines of all, the state of the slowest
load of an adapter, or the sums of their numbers; the others are functions of Python."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[ResultT, *ArgumentTs]):
    """One control operation, typed by its result and its arguments.

    Attributes:
        name: For messages.
        number: On the wire; numbers are never reused.
        merged: How the results of several engine cores become one.
    """

    name: str
    number: int
    merged: Merged = "all"


class Control:
    """The operations of an engine core besides requests, as in `call(Control.SLEEP, 1)`."""

    RESET_PREFIX_CACHE: Final[Operation[bool]] = Operation("reset_prefix_cache", 1)
    """Forgets cached prefixes; False while requests are running."""

    STATS: Final[Operation[SchedulerStats]] = Operation("stats", 2, "first")
    """The scheduler's state after the last step. The answer also shows that the engine core's loop runs."""

    SHUTDOWN: Final[Operation[bool]] = Operation("shutdown", 3)
    """Ends the engine core after the answer."""

    RECENT_STEPS: Final[Operation[StepRecording, int]] = Operation("recent_steps", 4, "first")
    """The kept steps after the given step number, and the last events."""

    STEP_LOG: Final[Operation[bytes]] = Operation("step_log", 12, "first")
    """The step log that is kept in memory; empty where there is none."""

    SLEEP: Final[Operation[bool, int]] = Operation("sleep", 5)
    """Frees the KV storage, at level 2 the weights too; False while requests are running."""

    WAKE_UP: Final[Operation[bool]] = Operation("wake_up", 6)
    """Allocates and loads what `SLEEP` freed."""

    LOAD_ADAPTER: Final[Operation[str, str, str]] = Operation("load_adapter", 8, "slowest")
    """Reads the adapter of an identity from a folder: `loaded`, `loading` (ask again), or a sentence on why not."""

    UNLOAD_ADAPTER: Final[Operation[bool, str]] = Operation("unload_adapter", 9, "any")
    """Takes no further requests for an adapter, and drops it when its last one has ended; whether it was known."""

    START_PROFILE: Final[Operation[str]] = Operation("start_profile", 10, "first text")
    """Begins to record what the model runner computes; empty, or a sentence on why not."""

    STOP_PROFILE: Final[Operation[str]] = Operation("stop_profile", 11, "lines")
    """Ends that; the files written since the last answer, one a line."""

    SET_LOG_LEVEL: Final[Operation[bool, str]] = Operation("set_log_level", 13)
    """Sets the level of llmstack's log lines in the engine core's process, by one of `LOG_LEVELS`."""

    UPDATE_WEIGHTS: Final[Operation[tuple[str, str, str], str]] = Operation("update_weights", 14, "first")
    """Takes the weights of a folder in place of its own, without requests: why not or nothing, the digest of the
    weights then, and the numeric contract id."""

    RELEASE_SESSIONS: Final[Operation[tuple[int, int], str, str]] = Operation("release_sessions", 15, "sums")
    """Gives up the sessions of a tenant that have a name; how many there were, and the tokens that are forgotten."""

    SLEEP_LEVEL: Final[Operation[int]] = Operation("sleep_level", 7, "max")
    """0 while the engine core is awake, else the level of `SLEEP`."""
