"""One number for all decisions of a run."""

from __future__ import annotations

from hashlib import blake2b

from llmstack_types import SchedulerOutput


class DecisionHash:
    """A running hash over steps: equal hashes mean equal decisions, on any machine."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, scheduled: SchedulerOutput) -> None:
        """Adds the decisions of one step to the hash."""
        new = [(request.request_id, request.token_ids) for request in scheduled.new_requests]
        rows = [(*row[:4], list(row.draft_token_ids)) for row in scheduled.scheduled_requests]
        copies = (scheduled.swap_outs, scheduled.swap_ins, scheduled.block_copies)
        if scheduled.encoder_work or scheduled.freed_media:
            media = [[number for number, _ in request.media] for request in scheduled.new_requests]
            parts = [part[:3] for part in scheduled.encoder_work]
            self._hash.update(repr((media, parts, scheduled.freed_media)).encode())
        self._hash.update(repr((scheduled.step, new, rows, scheduled.removed_request_ids, copies)).encode())

    def hexdigest(self) -> str:
        """The hash of all steps so far."""
        return self._hash.hexdigest()
