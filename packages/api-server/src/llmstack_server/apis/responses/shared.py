"""Responses of a server with several API processes, each with its own store."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

from llmstack_server.apis.responses.local import LocalResponses, response_not_found
from llmstack_server.apis.responses.store import Item, StoredItem
from llmstack_server.state.peers import Peers
from llmstack_server.state.remote_streams import READING, Reader, RemoteReader, RemoteReaders
from llmstack_server.state.stream_record import FailedError, StreamAwayError, UnknownStreamError
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import ErrorAnswer, HTTPError, answer_to
from llmstack_server.web.sse import numbered_error_event
from llmstack_types import ServerOverloadedError
from llmstack_types.json_values import JSONObject, JSONValue

TOPIC = "responses"

# The id of a response contains the index of the process that keeps it.
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{3})[0-9a-f]{32}")
_ITEM_ID = re.compile(r"[A-Za-z]{2,5}_[0-9a-f]{32}")


class SharedResponses:
    """Responses by id, in this process or another one; an unknown or foreign id raises HTTPError 404.

    The owner is the tenant of the current client.
    """

    def __init__(self, local: LocalResponses, peers: Peers | None) -> None:
        self.local = local
        self._peers = peers
        self._readers = RemoteReaders()
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    @property
    def process_index(self) -> int:
        """The index of this process, which ids of its responses contain."""
        return 0 if self._peers is None else self._peers.index

    async def fetch(self, response_id: str) -> bytes:
        """The current state of a response, as JSON."""
        return _to_bytes(await self._ask("fetch", response_id))

    async def cancel(self, response_id: str) -> bytes:
        """Cancels a response in the background; raises InvalidRequestError for others."""
        return _to_bytes(await self._ask("cancel", response_id))

    async def delete(self, response_id: str) -> None:
        """Deletes a response, and cancels it first if it runs."""
        await self._ask("delete", response_id)

    async def input_items(self, response_id: str) -> tuple[StoredItem, ...]:
        """The input items of a response."""
        return _to_items(await self._ask("inputs", response_id))

    async def all_items(self, response_id: str) -> tuple[StoredItem, ...]:
        """The input and output items of a response; raises InvalidRequestError before its end."""
        return _to_items(await self._ask("items", response_id))

    async def follow(self, response_id: str, start: int = 0) -> AsyncIterator[bytes]:
        """The events of a streamed response in the background, from `start` on.

        Raises:
            InvalidRequestError: The response was not created in the background and as a stream.
        """
        owner = current_client.get().tenant  # now: the events are read in another context
        return self._follow(response_id, owner, await self._open(response_id, owner, start))

    async def _open(self, response_id: str, owner: str, start: int) -> Reader:
        index, peers = self._keeper(response_id), self._peers
        if index is None or peers is None:
            return self.local.open_events(response_id, owner, start)
        opened = await self._ask("events", response_id, start, owner)
        return RemoteReader(lambda text: peers.ask_one(index, f"{TOPIC} {text}"), opened, start)

    async def _follow(self, response_id: str, owner: str, reader: Reader) -> AsyncIterator[bytes]:
        try:
            while True:
                try:
                    batch = await reader.read()
                except StreamAwayError:  # this one has not read for long, or the process has ended
                    reader = await self._open(response_id, owner, reader.position)
                    continue
                for event in batch.parts:
                    yield event
                if batch.is_last:
                    return
        except FailedError as error:
            yield numbered_error_event(ErrorAnswer(**error.fields), max(0, reader.position - 1))
        finally:
            await reader.aclose()

    async def find_items(self, item_ids: Sequence[str]) -> dict[str, Item]:
        """The items with these ids, of any response of the current client."""
        found = {item_id: await self._find_item(item_id) for item_id in item_ids}
        return {item_id: item for item_id, item in found.items() if item is not None}

    async def _find_item(self, item_id: str) -> Item | None:
        owner = current_client.get().tenant
        item = await self.local.find_item(item_id, owner)
        if item is not None or self._peers is None or not _ITEM_ID.fullmatch(item_id):
            return item
        answers = await self._peers.ask(f"{TOPIC} item {item_id} 0 {owner}")
        return next((answer["value"] for answer in answers if answer.get("value") is not None), None)

    async def _ask(self, what: str, response_id: str, start: int = 0, owner: str | None = None) -> JSONValue:
        owner = current_client.get().tenant if owner is None else owner
        index = self._keeper(response_id)
        if index is None or self._peers is None:
            return await self._know(what, response_id, owner, start)
        answer = await self._peers.ask_one(index, f"{TOPIC} {what} {response_id} {start} {owner}")
        if answer is None:
            raise response_not_found()
        if "error" in answer:
            raise HTTPError(ErrorAnswer(**answer["error"]))
        return answer["value"]

    def _keeper(self, response_id: str) -> int | None:
        """The index of the process that keeps a response; None for this process."""
        match = _RESPONSE_ID.fullmatch(response_id)
        if match is None or self._peers is None:
            return None
        # A process adopts the responses of those that an earlier server had more of.
        index = int(match.group(1), 16) % self._peers.count
        return index if index != self._peers.index else None

    async def _know(self, what: str, subject: str, owner: str, start: int) -> JSONValue:
        local = self.local
        if what == "events":
            try:
                return self._readers.add(local.open_events(subject, owner, start))
            except UnknownStreamError:
                raise ServerOverloadedError("too many readers in other processes") from None
        asked: dict[str, Callable[[str, str], Awaitable[JSONValue]]] = {
            "fetch": local.fetch,
            "cancel": local.cancel,
            "delete": local.delete,
            "inputs": local.input_items,
            "items": local.all_items,
            "item": local.find_item,
        }
        return await asked[what](subject, owner)

    async def _answer(self, question: str) -> JSONObject:
        """The answer to a peer: a JSON value, or an error."""
        what, *words = question.split(" ")
        if what in READING:
            found: JSONObject = await self._readers.answer(what, words)
            return found
        subject, start, *owner = words  # without API keys the owner is empty
        try:
            value = await self._know(what, subject, owner[0] if owner else "", int(start))
        except Exception as error:  # noqa: BLE001 (any error is sent to the other process)
            answer = answer_to(error, subject)
            fields = {"status": answer.status, "type": answer.type, "code": answer.code, "param": answer.param}
            return {"error": fields | {"message": answer.message}}
        return {"value": _to_json(value)}


def _to_json(value: Any) -> JSONValue:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, tuple | list):
        return [_to_json(entry) for entry in value]
    return value


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _to_items(value: Sequence[Any]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item_id, _to_bytes(data)) for item_id, data in value)


def referenced_ids(value: Any) -> list[str]:
    """The ids of the items that an `input` refers to, up to the first entry that is no item: there it is refused.

    A body may have a million numbers in place of items, and no other request runs meanwhile.
    """
    items = [*takewhile(lambda item: isinstance(item, dict), value)] if isinstance(value, list) else []
    ids = [item.get("id") for item in items if item.get("type", "item_reference") == "item_reference"]
    return list(dict.fromkeys(item_id for item_id in ids if isinstance(item_id, str)))
