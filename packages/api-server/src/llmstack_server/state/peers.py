"""Questions between the API processes of one server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from llmstack_types.json_values import JSONValue

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 16 << 20
MAX_QUESTION_BYTES = 512
_RETRY_S = 0.02

Answers = Mapping[str, Callable[[], JSONValue]]
TopicAnswer = Callable[[str], Awaitable[JSONValue]]


class Peers:
    """Unix sockets in a private directory, one per API process; a context manager.

    Each process can answer for the whole server by asking the others. A question is a word, or a topic and its
    argument; an answer is JSON. A peer that does not answer in time is left out: it has ended, or is starting.

    Attributes:
        index: The index of this process, from 0 on.
        count: The number of processes.
    """

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self._directory = directory
        self._answers: Answers = {}
        self._topics: dict[str, TopicAnswer] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Peers:
        path = self._path(self.index)
        path.unlink(missing_ok=True)  # left by an earlier process with this index
        self._server = await asyncio.start_unix_server(self._answer, path, limit=MAX_QUESTION_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self._path(self.index).unlink(missing_ok=True)

    def answer_with(self, answers: Answers) -> None:
        """Sets the answers: a function for each word that may be asked."""
        self._answers = answers

    def add_topic(self, word: str, answer: TopicAnswer) -> None:
        """Answers questions that begin with `word`; `answer` receives the rest of the question."""
        self._topics[word] = answer

    async def ask(self, question: str) -> list[JSONValue]:
        """The answers of the other processes, in their order."""
        others = [index for index in range(self.count) if index != self.index]
        answers = await asyncio.gather(*(self.ask_one(index, question) for index in others))
        return [answer for answer in answers if answer is not None]

    async def ask_all(self, question: str, timeout_s: float) -> list[JSONValue]:
        """The answers of all other processes that run; one that is slow to answer is asked again.

        Raises:
            TimeoutError: One has given no answer in all the time.
        """
        others = [index for index in range(self.count) if index != self.index]
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*(self._ask_until_answered(index, question) for index in others))
        return [answer for answer in answers if answer is not None]

    async def ask_patiently(self, index: int, question: str, timeout_s: float, *, awaits_start: bool = False) -> object:
        """The answer of another process, which is asked again where it is slow; None where it does not run.

        `awaits_start`: Also one that does not run is asked again, since it is being replaced.

        Raises:
            TimeoutError: It has given no answer in all the time.
        """
        async with asyncio.timeout(timeout_s):
            return await self._ask_until_answered(index, question, awaits_start=awaits_start)

    async def _ask_until_answered(self, index: int, question: str, *, awaits_start: bool = False) -> object:
        """The answer of another process; None where it does not run."""
        while True:
            try:
                answer = await self._ask(index, question)
            except (FileNotFoundError, ConnectionRefusedError):  # a process that was killed leaves its socket
                if not awaits_start:
                    return None
                answer = None
            except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                answer = None
            if answer is not None:
                return answer
            await asyncio.sleep(_RETRY_S)

    async def ask_one(self, index: int, question: str) -> JSONValue:
        """The answer of another process; None where it gives none."""
        try:
            return await self._ask(index, question)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("API process %d gave no %s: %s", index, question, type(error).__name__)
            return None

    async def _ask(self, index: int, question: str) -> JSONValue:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(self._path(index), limit=MAX_ANSWER_BYTES)
            try:
                writer.write(f"{question}\n".encode())
                return json.loads(await reader.readuntil(b"\n"))
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                question = (await reader.readline()).decode().strip()
                writer.write(json.dumps(await self._answer_to(question)).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _answer_to(self, question: str) -> object:
        word, _, rest = question.partition(" ")
        if word in self._topics:
            return await self._topics[word](rest)
        answer = self._answers.get(question)
        return None if answer is None else answer()

    def _path(self, index: int) -> Path:
        return self._directory / f"api-{index}.sock"
