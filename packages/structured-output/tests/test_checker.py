"""Whether constraints compile, asked of a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_structured_output import ConstraintChecker
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer
from llmstack_types import InvalidRequestError, StructuredOutputsParams

# Fuel does not pay for the emptiness of an intersection: this takes minutes.
SLOW = {"allOf": [{"type": "string", "pattern": f"(a|b){{{n},}}[^c]*{n}.*"} for n in range(300, 400)]}


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[ConstraintChecker]:
    write_byte_tokenizer(tmp_path)
    checker = ConstraintChecker(tmp_path, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], timeout_s=0.5)
    yield checker
    await checker.shutdown()


async def refusal(checker: ConstraintChecker, **constraint: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await checker.check(StructuredOutputsParams(**constraint))
    return caught.value


def pid_of(checker: ConstraintChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


async def test_what_compiles_passes_and_what_does_not_is_refused_as_by_the_compiler(checker: ConstraintChecker) -> None:
    await checker.check(StructuredOutputsParams(json={"type": "object"}))
    for _ in range(2):  # the second answer is remembered
        error = await refusal(checker, json={"type": "objekt"})
        assert (error.param, error.code) == ("structured_outputs.json", "invalid_json_schema")
    await checker.check(StructuredOutputsParams(regex="[a-z]+"))


async def test_a_constraint_that_takes_too_long_is_refused_and_others_are_checked_on(
    checker: ConstraintChecker,
) -> None:
    error = await refusal(checker, json=SLOW)
    assert (error.param, error.code) == ("structured_outputs.json", "schema_too_complex")
    assert "0.5 s" in error.message
    await checker.check(StructuredOutputsParams(json={"type": "object"}))
    pid = pid_of(checker)
    assert (await refusal(checker, json=SLOW)).message == error.message
    assert pid_of(checker) == pid, "a remembered answer costs no process"


async def test_a_process_that_is_killed_is_started_again(checker: ConstraintChecker) -> None:
    await checker.check(StructuredOutputsParams(regex="a"))
    os.kill(pid_of(checker), signal.SIGKILL)
    assert checker._process is not None
    await checker._process.wait()
    await checker.check(StructuredOutputsParams(regex="b"))


async def test_who_leaves_while_waiting_spoils_no_answer_of_others(checker: ConstraintChecker) -> None:
    leaving = asyncio.create_task(checker.check(StructuredOutputsParams(json=SLOW)))
    staying = asyncio.create_task(refusal(checker, regex="["))
    await asyncio.sleep(0.2)
    leaving.cancel()
    assert (await staying).code == "invalid_regex"


async def test_many_at_once_are_checked_one_after_the_other(checker: ConstraintChecker) -> None:
    checks = [checker.check(StructuredOutputsParams(regex=f"x{number % 7}")) for number in range(40)]
    await asyncio.gather(*checks)


async def test_without_a_process_shutting_down_does_nothing(tmp_path: Path) -> None:
    checker = ConstraintChecker(tmp_path, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID])
    await checker.shutdown()
    await checker.shutdown()
