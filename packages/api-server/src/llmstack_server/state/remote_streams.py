"""Reading an answer that another process of the server has."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from llmstack_server.state.stream_record import (
    Batch,
    FailedError,
    Head,
    ReplacedError,
    StreamAwayError,
    StreamReader,
    UnknownStreamError,
)
from llmstack_types.json_values import JSONObject, JSONValue

# Less than the time in which peers have to answer.
MAX_WAIT_S = 0.5
READING: Final = ("read", "close")
"""The questions that `RemoteReaders` answer."""
# One that asks for nothing for so long has ended with its process.
SILENCE_S = 10.0
MAX_READERS = 4096
MAX_TRIES = 3

Ask = Callable[[str], Awaitable[JSONValue]]


class Reader(Protocol):
    """Reads one answer, in whichever process it is.

    Attributes:
        position: The events that it has read, those before it included.
    """

    @property
    def position(self) -> int: ...

    @property
    def stream_id(self) -> str:
        """The id of the stream."""
        ...

    async def read(self) -> Batch:
        """The next parts; raises as `StreamRecord.read`."""
        ...

    async def aclose(self) -> None:
        """Takes the reader away, so that the time without one begins. Idempotent."""
        ...


class RemoteReader:
    """Asks the process that has the answer."""

    def __init__(self, ask: Ask, opened: JSONObject, after: int) -> None:
        """`opened`: The answer of the process to the opening of the reader."""
        self._ask = ask
        self._token = str(opened["token"])
        self._stream_id = str(opened["id"])
        self._position = after
        self._knows_head = False

    @property
    def stream_id(self) -> str:
        """The id of the stream."""
        return self._stream_id

    @property
    def position(self) -> int:
        """The number of events up to the last one that was read."""
        return self._position

    async def read(self) -> Batch:
        """The next parts; raises as `StreamRecord.read`, and StreamAwayError where the process has ended."""
        num_tries = 0
        while num_tries < MAX_TRIES:
            answer = await self._ask(f"read {self._token} {self._position} {int(self._knows_head)}")
            if not isinstance(answer, dict):
                num_tries += 1
                continue
            num_tries = 0
            if "waits" in answer:
                continue
            batch = _batch_of(answer)
            self._position = batch.first - 1 + len(batch.parts)
            self._knows_head = True
            return batch
        raise StreamAwayError

    async def aclose(self) -> None:
        """Removes the reader in the other process."""
        await self._ask(f"close {self._token}")


class RemoteReaders:
    """Readers in other processes of the answers of this process."""

    def __init__(self) -> None:
        self._token_to_reader: dict[str, StreamReader] = {}
        self._token_to_timer: dict[str, asyncio.TimerHandle] = {}

    def add(self, reader: StreamReader) -> JSONObject:
        """Keeps a reader; what its process is answered.

        Raises:
            UnknownStreamError: There are too many.
        """
        if len(self._token_to_reader) >= MAX_READERS:
            reader.close()
            raise UnknownStreamError
        token = secrets.token_hex(8)
        self._token_to_reader[token] = reader
        self._expect(token)
        return {"token": token, "id": reader.stream_id}

    async def answer(self, what: str, words: Sequence[str]) -> JSONValue:
        """The answer to a question of a `RemoteReader`: `read` or `close`."""
        if what == "read":
            return await self._read(words[0], int(words[1]), knows_head=words[2] == "1")
        self.close(words[0])
        return True

    async def _read(self, token: str, position: int, *, knows_head: bool) -> JSONObject:
        reader = self._token_to_reader.get(token)
        if reader is None:  # of the process before this one
            return {"error": "away"}
        self._expect(token)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return _object_of(await reader.read_from(position, knows_head=knows_head))
        except TimeoutError:
            return {"waits": True}
        except FailedError as error:
            return {"error": "failed", "fields": dict(error.fields)}
        except ReplacedError:
            self.close(token)
            return {"error": "replaced"}
        except UnknownStreamError:
            return {"error": "unknown"}

    def close(self, token: str) -> None:
        """Ends a reader. Idempotent."""
        timer = self._token_to_timer.pop(token, None)
        if timer is not None:
            timer.cancel()
        reader = self._token_to_reader.pop(token, None)
        if reader is not None:
            reader.close()

    def _expect(self, token: str) -> None:
        """Waits for the next question, for some time."""
        timer = self._token_to_timer.get(token)
        if timer is not None:
            timer.cancel()
        self._token_to_timer[token] = asyncio.get_running_loop().call_later(SILENCE_S, self.close, token)


def _object_of(batch: Batch) -> JSONObject:
    head = batch.head
    return {
        "status": head.status,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers],
        "is_stream": head.is_stream,
        "request_id": head.request_id,
        "first": batch.first,
        "parts": [part.decode("utf-8", "replace") for part in batch.parts],
        "is_last": batch.is_last,
        "is_resumable": batch.is_resumable,
    }


def _batch_of(answer: JSONObject) -> Batch:
    error = answer.get("error")
    if error == "failed":
        raise FailedError(answer["fields"])
    if error == "replaced":
        raise ReplacedError
    if error == "away":
        raise StreamAwayError
    if error is not None:
        raise UnknownStreamError
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in answer["headers"])
    head = Head(int(answer["status"]), headers, bool(answer["is_stream"]), str(answer["request_id"]))
    parts = [part.encode() for part in answer["parts"]]
    return Batch(head, int(answer["first"]), parts, bool(answer["is_last"]), bool(answer["is_resumable"]))
