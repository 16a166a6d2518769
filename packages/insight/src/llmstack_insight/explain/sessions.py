"""Sentences on the session that a request goes on with, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmstack_insight.explain.history import History
from llmstack_insight.explain.waits import Limits
from llmstack_insight.explain.wording import to_ms, to_text

_WHY: Final[Mapping[str, str]] = {
    "evicted": "were evicted",
    "released": "had been released",
    "reset": "were forgotten when the prefix cache was emptied",
    "other_adapter": "belong to another adapter or cache_salt",
    "no_state": "could not be used, since no state was kept where they end",
    "not_looked_up": "were not looked for, since the request needs its whole prompt computed",
    "disk_costly": "were on disk, where reading them would have taken longer than computing",
    "disk_late": "were on disk, but did not come in time",
    "disk_failed": "were on disk, in files that could not be used",
    "disk_no_room": "were on disk, but memory had no room for them",
}


def session(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """Sentences on the earlier request whose prompt it goes on with: how much was found, and why not the rest."""
    went_on = history.note_of(history.request_id).went_on
    if went_on is None:
        return
    last = history.name_of(went_on.last_request_id)
    num_tokens, num_found = went_on.num_tokens, went_on.num_found_tokens
    shown = history.shown_tokens(num_tokens, [went_on.last_request_id])
    share = 100 * num_found // num_tokens if num_tokens else 100
    facts["goes_on_with"], facts["paused_ms"] = last, to_ms(went_on.paused_s)
    facts["session_tokens"], facts["found_percent"] = shown, share
    yield (
        f"It goes on with the session of {last}, which had ended {to_text(went_on.paused_s)} before: "
        f"{share} % of the {shown} tokens of that were found."
    )
    if num_found >= num_tokens:
        return
    facts["lost_cause"] = went_on.cause
    why = _WHY.get(went_on.cause, "were lost")
    if went_on.evicted_for and went_on.cause not in ("released", "reset", "not_looked_up"):
        taker = history.name_of(went_on.evicted_for)
        facts["kept_ms"], facts["dropped_for"] = to_ms(went_on.kept_s), taker
        kept = f" They had been kept for {to_text(went_on.kept_s)}, until blocks were needed for {taker}."
    else:
        kept = ""
    yield f"The others {why}, and were computed again.{kept}"
