"""Client of the checking process, which compiles constraints before admission."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmstack_structured_output import errors
from llmstack_structured_output.compiler import kind_of, normal_form
from llmstack_types import InvalidRequestError, ServerOverloadedError, StructuredOutputsParams

DEFAULT_TIMEOUT_S = 5.0
_MAX_NUM_WAITING = 256
_MAX_NUM_REMEMBERED = 1024
_MAX_LINE_BYTES = 1 << 20


class ConstraintChecker:
    """Checks constraints one after the other, off the event loop, each within a time. Used by one event loop.

    The process starts with the first constraint, ends by itself where one takes too long, and is started again for the
    next one. Answers are remembered.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """For the arguments see `GrammarCompiler`. `timeout_s`: What compiling one constraint may take."""
        configuration = {
            "tokenizer_folder": str(tokenizer_folder),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._configuration = json.dumps(configuration)
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._remembered: OrderedDict[StructuredOutputsParams, InvalidRequestError | None] = OrderedDict()

    async def check(self, params: StructuredOutputsParams) -> None:
        """Returns if the constraint compiles.

        Raises:
            InvalidRequestError: It does not, or takes too long; as `GrammarCompiler.compile`.
            ServerOverloadedError: Too many are waiting.
        """
        params = normal_form(params)
        if params not in self._remembered:
            if self._num_waiting >= _MAX_NUM_WAITING:
                raise ServerOverloadedError("too many constraints are being compiled")
            self._num_waiting += 1
            try:
                async with self._lock:
                    if params not in self._remembered:
                        self._remember(params, await self._ask(params))
            finally:
                self._num_waiting -= 1
        error = self._remembered.get(params)
        if error is not None:
            raise InvalidRequestError(error.message, param=error.param, code=error.code)

    async def shutdown(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _remember(self, params: StructuredOutputsParams, error: InvalidRequestError | None) -> None:
        self._remembered[params] = error
        while len(self._remembered) > _MAX_NUM_REMEMBERED:
            self._remembered.popitem(last=False)

    async def _ask(self, params: StructuredOutputsParams) -> InvalidRequestError | None:
        process = await self._living_process()
        try:
            answer = await _exchange(process, json.dumps(asdict(params)))
        except asyncio.CancelledError:
            await self.shutdown()  # its answer would be taken for the next one's
            raise
        if answer is None:
            self._process = None
            is_late = await process.wait() == -signal.SIGALRM
            return _refusal(params, f"it takes longer than {self._timeout_s:g} s to compile" if is_late else "")
        return InvalidRequestError(answer["message"], param=answer["param"], code=answer["code"]) if answer else None

    async def _living_process(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "llmstack_structured_output.checking_process",
                str(self._timeout_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
            )
            _write(self._process, self._configuration)
        return self._process


async def _exchange(process: asyncio.subprocess.Process, line: str) -> dict[str, Any] | None:
    """The answer to a line; None where the process has ended over it."""
    try:
        _write(process, line)
        answer = await process.stdout.readline() if process.stdout is not None else b""
    except OSError:
        answer = b""
    return json.loads(answer) if answer else None


def _write(process: asyncio.subprocess.Process, line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line.encode() + b"\n")


def _refusal(params: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    kind = kind_of(params)
    refuse = errors.grammar_too_complex if kind in ("regex", "choice", "grammar") else errors.schema_too_complex
    return refuse(f"structured_outputs.{kind}", reason or "its compiler runs out of memory or fails over it")
