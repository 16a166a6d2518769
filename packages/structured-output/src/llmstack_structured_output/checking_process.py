"""Process that checks whether constraints compile, one line per constraint.

`python -m llmstack_structured_output.checking_process` starts it.

A process of its own, because nothing else ends the work of a compiler: it is native code in a thread, and its fuel does
not pay for everything (a hundred patterns that must all match keep it busy for nine minutes).
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmstack_structured_output.compiler import GrammarCompiler
from llmstack_types import InvalidRequestError, StructuredOutputsParams

MAX_MEMORY_BYTES = 4 << 30


def answers(lines: Iterable[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The answer to each line but the first, which configures; the process ends where one takes longer."""
    numbered = iter(lines)
    compiler = _compiler(json.loads(next(numbered)))
    with contextlib.suppress(InvalidRequestError):  # a bad tokenizer is an error of each constraint
        compiler.compile(StructuredOutputsParams(regex="a"))  # reads the tokenizer, whose time is no constraint's
    for line in numbered:
        # The kernel keeps the time, and its signal ends native code too.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        answer = _answer(compiler, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield answer


def _compiler(configuration: dict[str, Any]) -> GrammarCompiler:
    return GrammarCompiler(
        Path(configuration["tokenizer_folder"]), configuration["vocab_size"], configuration["eos_token_ids"]
    )


def _answer(compiler: GrammarCompiler, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        compiler.compile(StructuredOutputsParams(**fields))
    except InvalidRequestError as error:
        return {"message": error.message, "param": error.param, "code": error.code}
    return {}


def main() -> None:
    """Reads standard input to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent closes our input
    for answer in answers(sys.stdin, float(sys.argv[1])):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
