"""Process that checks whether constraints compile, in child processes.

`python -m llmstack_structured_output.checking.process` starts it. Fuel does not pay for everything: a hundred patterns
that must all match keep a compiler busy for nine minutes, in native code that only the end of its process ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from llmstack_structured_output.compiler import GrammarCompiler
from llmstack_types import InvalidRequestError, StructuredOutputsParams
from llmstack_types.child_pool.server import Work, serve_children

MAX_MEMORY_BYTES = 4 << 30


def check_constraints(configuration: dict[str, Any]) -> Work:
    """Work that compiles a constraint, and returns message, param and code of its error, or nothing.

    Args:
        configuration: The arguments of `GrammarCompiler`.
    """
    compiler = GrammarCompiler(
        Path(configuration["tokenizer_folder"]), configuration["vocab_size"], configuration["eos_token_ids"]
    )
    with contextlib.suppress(InvalidRequestError):  # a bad tokenizer is an error of each constraint
        compiler.compile(StructuredOutputsParams(regex="a"))  # reads the tokenizer, whose time is no constraint's

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        try:
            compiler.compile(StructuredOutputsParams(**fields))
        except InvalidRequestError as error:
            return {"message": error.message, "param": error.param, "code": error.code}
        return {}

    return check


if __name__ == "__main__":
    serve_children(check_constraints, max_memory_bytes=MAX_MEMORY_BYTES)
