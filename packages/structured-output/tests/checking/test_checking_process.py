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
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID
from llmstack_types import InvalidRequestError, ServerOverloadedError, StructuredOutputsParams
from llmstack_types.child_pool.server import MAX_JOBS_PER_CHILD

# Fuel does not pay for the emptiness of an intersection. These are as many patterns as may match together, with so many
# repetitions that they go to the slow lane at once.
PATTERNS = [f".*[ab].{{{n}}}.*" for n in range(120, 136)]
SLOW = {
    "description": "so long that it counts as slow " * 300,
    "allOf": [{"anyOf": [{"type": "string", "pattern": pattern}]} for pattern in PATTERNS],
}


@pytest.fixture
async def checker(folder: Path) -> AsyncIterator[ConstraintChecker]:
    checker = ConstraintChecker(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], timeout_s=0.5)
    yield checker
    await checker.shutdown()


async def refusal(checker: ConstraintChecker, **constraint: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await checker.check(StructuredOutputsParams(**constraint))
    return caught.value


def process_of(checker: ConstraintChecker) -> asyncio.subprocess.Process:
    process = checker._client.process
    assert process is not None
    return process


async def test_what_compiles_passes_and_what_does_not_is_refused_as_by_the_compiler(checker: ConstraintChecker) -> None:
    await checker.check(StructuredOutputsParams(json={"type": "object"}))
    for _ in range(2):  # the second answer is remembered
        error = await refusal(checker, json={"type": "objekt"})
        assert (error.param, error.code) == ("structured_outputs.json", "invalid_json_schema")
    checks = [checker.check(StructuredOutputsParams(regex=f"x{number}")) for number in range(MAX_JOBS_PER_CHILD + 20)]
    await asyncio.gather(*checks)


async def test_a_constraint_that_takes_too_long_is_refused_and_the_process_stays(checker: ConstraintChecker) -> None:
    slow = asyncio.create_task(refusal(checker, json=SLOW))
    await checker.check(StructuredOutputsParams(regex="a"))
    pid = process_of(checker).pid
    error = await slow
    assert (error.param, error.code) == ("structured_outputs.json", "schema_too_complex")
    assert "0.5 s" in error.message
    await checker.check(StructuredOutputsParams(regex="b"))
    assert process_of(checker).pid == pid, "its child was ended, not the process"


async def children_of(checker: ConstraintChecker) -> list[int]:
    pid = process_of(checker).pid
    children = await asyncio.to_thread(Path(f"/proc/{pid}/task/{pid}/children").read_text)
    return [int(child) for child in children.split()]


async def test_a_compiler_that_crashes_ends_its_constraint_alone(folder: Path) -> None:
    checker = ConstraintChecker(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], timeout_s=30.0)
    try:
        crashing = asyncio.create_task(refusal(checker, json=SLOW))
        await checker.check(StructuredOutputsParams(regex="a"))
        pid = process_of(checker).pid
        for child in await children_of(checker):
            os.kill(child, signal.SIGKILL)
        assert "fails over it" in (await crashing).message
        await checker.check(StructuredOutputsParams(regex="b"))
        assert process_of(checker).pid == pid
    finally:
        await checker.shutdown()


async def test_an_idle_compiler_that_is_killed_fails_no_constraint(checker: ConstraintChecker) -> None:
    await checker.check(StructuredOutputsParams(regex="a"))
    (idle,) = await children_of(checker)
    os.kill(idle, signal.SIGSTOP)  # so that it is given the next constraint, and does not read it
    waiting = asyncio.create_task(checker.check(StructuredOutputsParams(regex="b")))
    await asyncio.sleep(0.2)
    os.kill(idle, signal.SIGKILL)
    await waiting
    assert idle not in await children_of(checker)


async def test_a_process_that_is_killed_is_started_again_for_those_that_wait(checker: ConstraintChecker) -> None:
    await checker.check(StructuredOutputsParams(regex="a"))
    process = process_of(checker)
    waiting = asyncio.create_task(refusal(checker, json=SLOW))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    await checker.check(StructuredOutputsParams(regex="b"))
    assert (await waiting).code == "schema_too_complex"
    assert process_of(checker).pid != process.pid


async def test_shutting_down_ends_the_process_with_its_children(checker: ConstraintChecker) -> None:
    waiting = asyncio.create_task(refusal(checker, json=SLOW))
    await checker.check(StructuredOutputsParams(regex="a"))  # the slow one has begun before
    pid = process_of(checker).pid
    waiting.cancel()
    await checker.shutdown()
    await checker.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_process_inherits_no_secrets(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSTACK_API_KEY", "sk-secret-of-the-server")
    monkeypatch.setenv("HF_TOKEN", "hf-secret-of-the-server")
    await checker.check(StructuredOutputsParams(regex="a"))
    pid = process_of(checker).pid
    environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
    assert b"secret-of-the-server" not in environment
    assert b"PATH=" in environment


async def test_the_process_and_its_children_end_with_the_process_that_started_them(folder: Path) -> None:
    checker = ConstraintChecker(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], timeout_s=30.0)
    waiting = asyncio.create_task(refusal(checker, json=SLOW))
    await checker.check(StructuredOutputsParams(regex="a"))
    process = process_of(checker)
    children = await children_of(checker)
    assert len(children) == 2
    waiting.cancel()
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does where that process is killed
    async with asyncio.timeout(30):
        assert await process.wait() == 0
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    await checker.shutdown()


async def test_a_process_that_is_being_started_is_ended_by_shutting_down(folder: Path) -> None:
    checker = ConstraintChecker(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], timeout_s=30.0)
    waiting = asyncio.create_task(checker.check(StructuredOutputsParams(json=SLOW)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert checker._client.process is None
    await checker.shutdown()
    with pytest.raises(ServerOverloadedError):
        await waiting
