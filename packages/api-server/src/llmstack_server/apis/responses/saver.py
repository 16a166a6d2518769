"""Copies of the store of responses in a database."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from llmstack_server.apis.responses.response_table import encoded_response
from llmstack_server.apis.responses.store import StoredResponse
from llmstack_server.state.kept_rows import KeptAnswer, KeptRows, Written
from llmstack_server.state.state_folder import cause_of
from llmstack_server.state.write_behind import WriteBehind
from llmstack_server.web.errors import HTTPError, storage_unavailable

logger = logging.getLogger(__name__)


class ResponseSaver(WriteBehind[StoredResponse]):
    """Follows a store.

    While the disk is full the store goes on in memory, new responses are refused, and the writer tries again every
    second.
    """

    def __init__(self, rows: KeptRows, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(rows, "stored responses")
        self._clock = clock

    def note_loaded(self, stored: StoredResponse) -> None:
        """A response of the store has these rows already."""
        num_events = 0 if stored.events is None else stored.events.num_parts
        num_cut_bytes = 0 if stored.source is None else stored.source.num_bytes
        self._written[stored.id] = Written(num_events, num_cut_bytes, num_events)

    def forget_loaded(self) -> None:
        """Drops the changes so far, but no removals: the responses were read from the database."""
        self._dirty = {response_id: None for response_id in self._dirty if response_id not in self._kept}

    def on_change(self, kept: StoredResponse) -> None:
        """A response was added, has further events, or has ended."""
        self._kept[kept.id] = kept
        self._note(kept.id)

    def on_removal(self, kept: StoredResponse) -> None:
        """A response was removed; its rows go, too."""
        if kept.events is not None:  # nothing will write them
            kept.events.release()
        self._kept.pop(kept.id, None)
        self._note(kept.id)

    def check(self) -> None:
        """Returns if responses can be stored.

        Raises:
            HTTPError: 503, the last attempt to write has failed.
        """
        if self.failure:
            raise HTTPError(storage_unavailable(self.failure))

    def _encoded(self, kept: StoredResponse, written: Written | None) -> KeptAnswer:
        ended_at = None if kept.ended_s is None else time.time() - (self._clock() - kept.ended_s)
        return encoded_response(kept, ended_at, 0 if written is None else written.num_kept_parts)

    def _note_written(self, kept: StoredResponse, written: Written) -> None:
        if kept.events is not None:
            kept.events.reveal(written.num_parts)

    def _begin_again(self) -> None:
        logger.warning("the folder of the stored responses is a new one: all that are in memory are written again")
        self._dirty = dict.fromkeys(self._kept)

    def _note_failure(self, answer_ids: Sequence[str], error: Exception) -> None:
        if not self.failure:
            logger.error("responses cannot be stored (%s): they are refused until they can", error)
        self.failure = cause_of(error)

    def _note_success(self) -> None:
        if self.failure:
            logger.warning("responses can be stored again")
        self.failure = ""
