"""Stored responses as a database keeps them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmstack_server.apis.responses.store import StoredItem, StoredResponse, events_of
from llmstack_server.state.kept_rows import KeptAnswer


def database_path(folder: str | Path, process_index: int) -> Path:
    """The database of one API process."""
    return Path(folder) / f"responses-{process_index}.sqlite3"


def encoded_response(stored: StoredResponse, ended_at: float | None, first_event: int) -> KeptAnswer:
    """A response with its events from the number `first_event` on, as the database keeps it."""
    facts = {"is_background": stored.is_background, "has_events": stored.events is not None}
    events = [] if stored.events is None else stored.events.parts.after(first_event, sys.maxsize)
    inputs, outputs = _encoded(stored.input_items), _encoded(stored.output_items)
    return KeptAnswer(
        stored.id, stored.owner, facts, stored.data, ended_at,
        num_parts=first_event + len(events), parts=events, inputs=inputs, outputs=outputs,
        request=stored.request, source=stored.source,
    )  # fmt: skip


def response_decoder(now: float, clock_s: float) -> Callable[[KeptAnswer], StoredResponse]:
    """Decodes the responses of one database; raises TypeError, ValueError or KeyError.

    `now`, `clock_s`: The time of the world, and of the clock of the store.
    """
    # The items of earlier turns are in each later response; in memory they are there once.
    shared: dict[tuple[str, StoredItem], StoredItem] = {}

    def decoded(answer: KeptAnswer) -> StoredResponse:
        facts, is_running = answer.facts, answer.ended_at is None
        if is_running and answer.request is None:
            raise TypeError("a running response has no request")
        inputs, outputs = (
            tuple([shared.setdefault((answer.owner, item), item) for item in map(_decoded, items)])
            for items in (answer.inputs, answer.outputs)
        )
        stored = StoredResponse(
            answer.id, answer.owner, inputs, outputs, answer.data, is_background=bool(facts["is_background"]),
            is_running=is_running, request=answer.request, source=answer.source if is_running else None,
        )  # fmt: skip
        if answer.ended_at is not None:
            # A clock that was set back makes no response younger than it can be.
            stored.ended_s = clock_s - max(0.0, now - answer.ended_at)
        if facts["has_events"]:
            stored.events = events_of(answer.id, answer.owner, answer.parts)
            if is_running:
                stored.events.hold()
                stored.events.reveal(len(answer.parts))
            else:
                stored.events.finish()
        return stored

    return decoded


def _encoded(items: Sequence[StoredItem]) -> list[bytes]:
    return [b"%b\n%b" % (json.dumps(item.id).encode(), item.data) for item in items]


def _decoded(piece: bytes) -> StoredItem:
    item_id, _, data = piece.partition(b"\n")
    return StoredItem(json.loads(item_id), data)
