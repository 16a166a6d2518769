"""Checks that constraints compile, before a request is accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmstack_structured_output import errors
from llmstack_structured_output.checking.answers import RememberedAnswers, key_of
from llmstack_structured_output.checking.budgets import CompileBudgets
from llmstack_structured_output.checking.queue import CheckQueue, Job
from llmstack_structured_output.compiler import check_sizes, kind_of, normal_form
from llmstack_structured_output.cost import expected_seconds
from llmstack_structured_output.limits import GrammarLimits
from llmstack_types import InvalidRequestError, LLMStackError, ServerOverloadedError, StructuredOutputsParams
from llmstack_types.child_pool.client import ChildPool, Outcome

DEFAULT_TIMEOUT_S = 5.0
QUICK_S = 0.25
"""Processor time of the quick lane. A constraint that needs more begins again in the slow lane."""

_Answer = InvalidRequestError | None


@dataclass(slots=True, eq=False)
class _Check:
    """One constraint of one tenant, and the callers that wait for the answer."""

    key: bytes
    params: StructuredOutputsParams
    job: Job
    answer: asyncio.Future[_Answer]
    num_callers: int = field(default=0)


class ConstraintChecker:
    """Compiles constraints off the event loop, several at once, each within a time. Used by one event loop.

    Cheap constraints have a lane of their own. In a lane the tenant that has used least is next. The processor time of
    each tenant is bounded, and answers are remembered. A caller that leaves ends nothing that has begun.
    """

    def __init__(
        self,
        tokenizer_folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For the arguments see `GrammarCompiler`. `timeout_s`: Processor time for one constraint."""
        arguments = {
            "tokenizer_folder": str(tokenizer_folder), "vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids),
        }  # fmt: skip
        module = "llmstack_structured_output.checking.process"
        self._client = ChildPool(module, arguments, purpose="compiles constraints", reason="constraints")
        self._timeout_s = timeout_s
        self._quick_s = min(QUICK_S, timeout_s)
        self._budgets = CompileBudgets(clock)
        self._answers = RememberedAnswers(clock)
        self._queue = CheckQueue(self._budgets.used_s)
        self._checks: dict[bytes, _Check] = {}
        self._by_job: dict[int, _Check] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def check(self, params: StructuredOutputsParams, tenant: str = "") -> None:
        """Returns if the constraint compiles. `tenant`: An opaque id of the API key.

        Raises:
            InvalidRequestError: It does not, or takes too long; as `GrammarCompiler.compile`.
            TenantLimitError: The tenant's constraints have used up their processor time.
            ServerOverloadedError: Too many are waiting, or the machine is too busy.
        """
        params = normal_form(params)
        check_sizes(params, GrammarLimits())
        key = key_of(params, tenant)
        found = self._answers.find(key)
        error = await self._wait(key, params, tenant) if found is None else found[0]
        if error is not None:
            raise InvalidRequestError(error.message, param=error.param, code=error.code)

    async def shutdown(self) -> None:
        """Ends the process; all that wait are refused. Idempotent, and final."""
        await self._client.shutdown()
        while self._running:
            await asyncio.gather(*self._running)
            await asyncio.sleep(0)  # lets those that have ended leave the set

    async def _wait(self, key: bytes, params: StructuredOutputsParams, tenant: str) -> _Answer:
        check = self._checks.get(key) or self._begin(key, params, tenant)
        check.num_callers += 1
        try:
            return await asyncio.shield(check.answer)
        finally:
            check.num_callers -= 1
            if not check.num_callers and not check.answer.done() and self._queue.leave(check.job):
                self._forget(check)
                if check.job.is_slow:
                    self._budgets.settle(tenant, self._timeout_s, 0.0)

    def _begin(self, key: bytes, params: StructuredOutputsParams, tenant: str) -> _Check:
        self._queue.check_room(tenant)
        cost_s = expected_seconds(params)
        job = Job(tenant, cost_s, is_slow=cost_s > self._quick_s)
        check = _Check(key, params, job, asyncio.get_running_loop().create_future())
        check.answer.add_done_callback(_retrieve)
        self._let_wait(check)
        self._checks[key] = check
        self._start_jobs()
        return check

    def _let_wait(self, check: _Check) -> None:
        """Lets the job of a check wait, where its tenant has time left."""
        if check.job.is_slow:
            self._budgets.reserve(check.job.tenant, self._timeout_s)
        else:
            self._budgets.check_quick(check.job.tenant)
        self._by_job[id(check.job)] = check
        self._queue.add(check.job)

    def _start_jobs(self) -> None:
        for job in self._queue.take():
            task = asyncio.create_task(self._run(self._by_job.pop(id(job))))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, check: _Check) -> None:
        """Compiles one constraint, and lets the next ones begin."""
        job = check.job
        limit_s = self._timeout_s if job.is_slow else self._quick_s
        taken_s = 0.0
        try:
            outcome = await self._client.run(asdict(check.params), limit_s=limit_s, is_slow=job.is_slow)
            taken_s = outcome.processor_s
        except LLMStackError as error:
            self._end(check, error)
            return
        finally:
            self._queue.end(job)
            self._budgets.settle(job.tenant, self._timeout_s if job.is_slow else 0.0, taken_s)
            self._start_jobs()
        self._conclude(check, outcome)

    def _conclude(self, check: _Check, outcome: Outcome) -> None:
        """Answers; or lets a constraint that was expected to be cheap, and is not, wait in the slow lane."""
        is_cut_short = outcome.is_late or outcome.is_starved
        if is_cut_short and not check.job.is_slow and self._quick_s < self._timeout_s:
            check.job = Job(check.job.tenant, max(check.job.cost_s, self._quick_s), is_slow=True)
            try:
                self._let_wait(check)
            except LLMStackError as error:
                self._end(check, error)
            self._start_jobs()
        elif outcome.is_starved:
            self._end(check, ServerOverloadedError("no processor time for constraints", reason="constraints"))
        else:
            answer = self._answer(check.params, outcome)
            self._answers.add(check.key, answer)
            self._end(check, answer)

    def _answer(self, params: StructuredOutputsParams, outcome: Outcome) -> _Answer:
        if outcome.answer is None:
            late = f"it takes longer than {self._timeout_s:g} s to compile"
            return _refusal(params, late if outcome.is_late else "its compiler runs out of memory or fails over it")
        if not outcome.answer:
            return None
        return InvalidRequestError(
            outcome.answer["message"], param=outcome.answer["param"], code=outcome.answer["code"]
        )

    def _end(self, check: _Check, answer: _Answer | LLMStackError) -> None:
        self._forget(check)
        if answer is None or isinstance(answer, InvalidRequestError):
            check.answer.set_result(answer)
        else:
            check.answer.set_exception(answer)

    def _forget(self, check: _Check) -> None:
        self._checks.pop(check.key, None)
        self._by_job.pop(id(check.job), None)


def _retrieve(answer: asyncio.Future[_Answer]) -> None:
    """Looks at the exception of an answer that no caller waits for any longer."""
    if not answer.cancelled():
        answer.exception()


def _refusal(params: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    kind = kind_of(params)
    refuse = errors.grammar_too_complex if kind in ("regex", "choice", "grammar") else errors.schema_too_complex
    return refuse(f"structured_outputs.{kind}", reason)
