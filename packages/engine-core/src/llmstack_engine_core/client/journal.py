"""The requests in flight, with all that another engine core needs to resume them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from llmstack_types import EngineCoreOutput, EngineCoreRequest


@dataclass(slots=True)
class _Entry:
    request: EngineCoreRequest
    output_token_ids: array[int] = field(default_factory=lambda: array("I"))


class Journal:
    """Requests in the order of their arrival, each with the tokens that its user has got.

    A token takes 4 bytes; a request may not outgrow the model's context, so the limit of requests bounds it all.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def request_ids(self) -> list[str]:
        """Of the requests in flight."""
        return list(self._entries)

    def add(self, request: EngineCoreRequest) -> bool:
        """Adds a request with the tokens that it has already; False if its id is in use."""
        if request.request_id in self._entries:
            return False
        entry = _Entry(request)
        entry.output_token_ids.extend(request.output_token_ids)
        self._entries[request.request_id] = entry
        return True

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Drops requests; those that were in flight."""
        return [request_id for request_id in dict.fromkeys(request_ids) if self._entries.pop(request_id, None)]

    def note(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Notes the tokens of a step, and drops requests that ended with it."""
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            if output.finish_reason is not None:
                del self._entries[output.request_id]
            else:
                entry.output_token_ids.extend(output.new_token_ids)

    def resumed(self, request_id: str) -> EngineCoreRequest | None:
        """The request as it goes on; None for one that cannot: the beams of a search are known to its engine core only.

        It is sent as a new request: a fork would need its parent, which may have ended.
        """
        entry = self._entries[request_id]
        if entry.request.sampling_params.use_beam_search:
            return None
        return replace(entry.request, fork_of="", output_token_ids=tuple(entry.output_token_ids))
