"""The events of a stream that was begun again, after those of its first run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llmstack_server.web.sse import encode_json

_DATA: Final = b"data: "
_END: Final = b"\n\n"
# What two runs of one request do not have in common, or only in events that are cut at the same places.
_OWN_FIELDS: Final = frozenset({
    "id", "created", "usage", "metrics", "receipt", "timings", "system_fingerprint", "service_tier",
})  # fmt: skip
_LASTING_FIELDS: Final = ("id", "created")
# What each event has a piece of.
_TEXT_FIELDS: Final = frozenset({
    "arguments", "content", "partial_json", "reasoning", "reasoning_content", "refusal", "text", "thinking",
})  # fmt: skip
_LIST_FIELDS: Final = frozenset({"logprobs", "token_ids"})
# The last piece of a text may be alone, or with the reason of its end.
_END_FIELDS: Final = frozenset({"finish_reason", "stop_reason", "stop_sequence"})

_Path = tuple[str, ...]
_Form = tuple[str, str]


class OtherTextError(Exception):
    """The second run of a request differs from what its reader may have seen of the first."""


@dataclass
class _Place:
    """The text that the first run has sent at one place, such as a choice, and the second has not repeated.

    Attributes:
        forms: The forms of its events, in their order; equal neighbours are one.
        current: The last one that the second run has repeated.
        texts: The text of each kind.
        counts: Entries of lists, which are not compared: rounded values may differ.
    """

    forms: list[_Form] = field(default_factory=list)
    current: _Form | None = None
    texts: dict[_Path, str] = field(default_factory=dict)
    counts: dict[_Path, int] = field(default_factory=dict)


class EarlierStream:
    """Follows a second run, and passes on what its reader cannot have seen yet.

    Both runs have the same text, cut into events at other places.

    Attributes:
        lasting: `id` and `created` of the first run.
    """

    def __init__(self, events: Sequence[bytes]) -> None:
        """`events`: Those of the first run, each with its end."""
        self._places: dict[str, _Place] = {}
        self.lasting: dict[str, Any] = {}
        for raw in events:
            _, event = _split(raw)
            if isinstance(event, dict):
                self.lasting = self.lasting or _lasting_of(event)
            self._note(event)

    def rest_of(self, raw: bytes) -> bytes | None:
        """The new part of the next event of the second run; None if there is none.

        Raises:
            OtherTextError: It is not as in the first run.
        """
        before, event = _split(raw)
        if not isinstance(event, dict):
            return raw
        place = self._places.get(_place_of(event))
        if place is not None and not self._take(event, place):
            return None
        event |= {name: value for name, value in self.lasting.items() if name in event}
        return before + _DATA + encode_json(event).encode("utf-8", "replace") + _END

    def _note(self, event: Any) -> None:
        if not isinstance(event, dict):
            return
        place = self._places.setdefault(_place_of(event), _Place())
        form = _form_of(event)
        if not place.forms or place.forms[-1] != form:
            place.forms.append(form)
        for path, holder, name in _leaves(event):
            value = holder[name]
            if isinstance(value, str):
                place.texts[path] = place.texts.get(path, "") + value
            else:
                place.counts[path] = place.counts.get(path, 0) + len(value)

    def _take(self, event: dict[str, Any], place: _Place) -> bool:
        """Removes from the event what the first run has sent; whether the rest is new."""
        form = _form_of(event)
        is_known = form == place.current or form in place.forms
        if form != place.current and is_known:
            del place.forms[: place.forms.index(form) + 1]
            place.current = form
        has_text = has_rest = False
        for path, holder, name in _leaves(event):
            value = holder[name]
            has_text = has_text or bool(value)
            if isinstance(value, str):
                seen = place.texts.get(path, "")
                num_common = min(len(seen), len(value))
                if seen[:num_common] != value[:num_common]:
                    raise OtherTextError
                place.texts[path], holder[name] = seen[num_common:], value[num_common:]
            else:
                num_common = min(place.counts.get(path, 0), len(value))
                place.counts[path] = place.counts.get(path, 0) - num_common
                holder[name] = value[num_common:]
            has_rest = has_rest or bool(holder[name])
        # The first run may have sent a text together with what came before or after it.
        if not has_rest and (is_known or (has_text and not _has_end(form))):
            return False
        is_repeated = not place.forms or (len(place.forms) == 1 and place.forms[0][0] == form[0])
        if any(place.texts.values()) or not is_repeated:
            raise OtherTextError  # the second run goes on where the first one had more
        place.forms.clear()
        return True


def _lasting_of(event: dict[str, Any]) -> dict[str, Any]:
    message = event.get("message")  # of `/v1/messages`, whose other events name no id
    named = message if isinstance(message, dict) else event
    return {name: named[name] for name in _LASTING_FIELDS if name in named}


def _split(raw: bytes) -> tuple[bytes, Any]:
    """The lines before the data of an event, and the data; None where they are no JSON."""
    before, found, data = raw.rpartition(_DATA)
    try:
        return before, json.loads(data) if found else None
    except ValueError:
        return before, None


def _place_of(event: dict[str, Any]) -> str:
    """One choice of a chat or a completion; the content blocks of a message follow each other."""
    return ",".join(str(choice.get("index")) for choice in _dicts(event.get("choices")))


def _form_of(event: dict[str, Any]) -> _Form:
    """The event without texts and without what is another one in each run, and what it says of the end.

    Which texts it has depends on where the run is cut: one event may have the last text and the end, or two events.
    """
    ends: list[Any] = []
    return encode_json(_formed(event, ends)), encode_json(ends)


def _formed(value: Any, ends: list[Any]) -> Any:
    if isinstance(value, list):
        return [_formed(part, ends) for part in value]
    if not isinstance(value, dict):
        return value
    ends += [value[name] for name in value if name in _END_FIELDS]
    return {
        name: _formed(part, ends)
        for name, part in value.items()
        if name not in _OWN_FIELDS
        and name not in _END_FIELDS
        and name not in _LIST_FIELDS
        and not (name in _TEXT_FIELDS and isinstance(part, str))
    }


def _has_end(form: _Form) -> bool:
    return any(end is not None for end in json.loads(form[1]))


def _leaves(value: Any, path: _Path = (), *, in_list_field: bool = False) -> list[tuple[_Path, dict[str, Any], str]]:
    """The places of texts and lists: their path, and what holds them by which name."""
    found: list[tuple[_Path, dict[str, Any], str]] = []
    if isinstance(value, list):
        for part in value:
            index = str(part.get("index", "")) if isinstance(part, dict) else ""
            found += _leaves(part, (*path, index))
    elif isinstance(value, dict):
        for name, part in value.items():
            at = (*path, name)
            if name in _OWN_FIELDS or name in _END_FIELDS:
                continue
            is_text = isinstance(part, str) and name in _TEXT_FIELDS and not in_list_field
            is_list = isinstance(part, list) and (in_list_field or name in _LIST_FIELDS)
            if is_text or is_list:
                found.append((at, value, name))
            elif isinstance(part, (dict, list)):
                found += _leaves(part, at, in_list_field=name in _LIST_FIELDS)
    return found


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
