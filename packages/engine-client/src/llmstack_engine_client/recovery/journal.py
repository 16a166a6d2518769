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
        """The ids of the requests in flight."""
        return list(self._entries)

    def group(self, request_id: str) -> list[str]:
        """The request, and with a beam search all of its requests, the first one first."""
        entry = self._entries[request_id]
        if not entry.request.sampling_params.use_beam_search:
            return [request_id]
        first_id = entry.request.fork_of or request_id
        return [first_id, *self.followers(first_id)] if first_id in self._entries else [request_id]

    def add(self, request: EngineCoreRequest) -> bool:
        """Adds a request with the tokens that it has already; False if its id is in use."""
        if request.request_id in self._entries:
            return False
        entry = _Entry(request)
        entry.output_token_ids.extend(request.output_token_ids)
        self._entries[request.request_id] = entry
        return True

    def is_follower(self, request_id: str) -> bool:
        """Whether it belongs to the beam search of an earlier request in flight."""
        request = self._entries[request_id].request if request_id in self._entries else None
        return request is not None and request.sampling_params.use_beam_search and request.fork_of in self._entries

    def followers(self, request_id: str) -> list[str]:
        """The other requests of the beam search that this request began."""
        if not self._entries[request_id].request.sampling_params.use_beam_search:
            return []
        return [name for name, entry in self._entries.items() if entry.request.fork_of == request_id]

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
        """The request as it goes on; None for one that cannot: a beam search of which a beam was aborted.

        It is sent as a new request: a fork would need its parent, which may have ended. A beam search starts again
        with all of its requests: it has sent nothing before its end.
        """
        entry = self._entries[request_id]
        if entry.request.sampling_params.use_beam_search:
            first_id = entry.request.fork_of or request_id
            is_whole = (
                first_id in self._entries and len(self.followers(first_id)) == entry.request.sampling_params.n - 1
            )
            return entry.request if is_whole else None
        return replace(entry.request, fork_of="", output_token_ids=tuple(entry.output_token_ids))
