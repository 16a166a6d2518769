"""The protocol of a scheduler, in an engine core, a replay and a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    PrefixMedia,
    SchedulerOutput,
    SchedulerStats,
    SessionReturn,
)
from llmstack_types.media import NO_MEDIA


class Scheduler(Protocol):
    """Decides what each step computes. Pure: no clock, no randomness, no I/O; the time comes as an argument."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: It can never fit, or its id is in use; nothing has changed.
        """
        ...

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> int:
        """Adds a request that goes on from where a running one is; how many of its tokens need not be computed.

        Raises:
            InvalidRequestError: There is no such parent, or the child cannot be added; nothing has changed.
        """
        ...

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and frees their blocks; unknown ids are ignored. No output follows."""
        ...

    def has_unfinished_requests(self) -> bool:
        """True while a step could return outputs, or has to remove a request's row from the runner."""
        ...

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step; under asynchronous scheduling before the last one is updated."""
        ...

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Applies the results of the oldest step under way: appends tokens, ends requests, frees blocks."""
        ...

    def stats(self) -> SchedulerStats:
        """The state after the last step."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        ...

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of an owner that have a name; how many there were, and the tokens that are forgotten.

        What others share stays, and what requests hold does until they end.
        """
        ...

    def take_returns(self) -> list[SessionReturn]:
        """The sessions that have gone on since the last call. It decides nothing."""
        ...

    def cached_prefix(
        self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA
    ) -> tuple[list[int], int]:
        """The blocks of the longest cached prefix, at most all but the last token, and the block of its state.

        The latter is 0 for a model without states. It decides nothing.
        """
        ...

    def contents(self, block_ids: Iterable[int]) -> list[int]:
        """The content of each cached block as a number that no other one ever has; 0 where it is gone.

        It decides nothing.
        """
        ...

    def import_prefix(
        self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA
    ) -> tuple[list[int], int]:
        """Makes the whole blocks before the last token findable; those that the caller fills before the next step.

        They hold the end of the prefix: what comes before is cached already. Empty if nothing is missing, or if there
        is no room. The second number is the block that the caller fills with the state after them; 0 for none.
        """
        ...
