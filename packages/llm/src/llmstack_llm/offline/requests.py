"""The requests of an `LLM` in its engine."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from llmstack_llm import request_errors
from llmstack_llm.admission.control_fields import INT32_MAX
from llmstack_llm.offline.llm_engine import LLMEngine
from llmstack_llm.offline.media import release_all
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import PoolingRequestOutput
from llmstack_llm.requests import AdmittedRequest, PromptInput
from llmstack_types import InvalidRequestError

GivenT = TypeVar("GivenT")
UseTqdm = bool | Callable[..., "tqdm[Any]"]
Output = RequestOutput | PoolingRequestOutput


def without_note(error: InvalidRequestError) -> InvalidRequestError:
    """The error without the note in brackets that clients over HTTP look for."""
    message = error.message.removesuffix(" (less_than_equal)").removesuffix(" (greater_than_equal)")
    return InvalidRequestError(message, param=error.param, code=error.code)


class OfflineRequests:
    """The requests of one `LLM` in its engine.

    Requests that are queued wait until `wait` takes their outputs; a `run` in between computes them too, and keeps
    their outputs for it. Calls of several threads run one after the other.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._queued_id_to_output: dict[str, Output | None] = {}

    def run(
        self, admitted: Sequence[AdmittedRequest | AdmittedPooling], priorities: Sequence[int], use_tqdm: UseTqdm
    ) -> list[Output]:
        """Outputs of requests in their order; interrupted, it leaves none of them behind."""
        with self._lock:
            outputs: list[Output] = []
            start = 0
            while start < len(admitted):  # again where there was not memory for the pictures of all
                begun = self._engine.media.decode(admitted[start:])
                end = start + len(begun)
                try:
                    outputs += self._finish(self._add(begun, priorities[start:end]), use_tqdm)
                finally:
                    release_all(begun)
                start = end
            return outputs

    def enqueue(self, admitted: Sequence[AdmittedRequest | AdmittedPooling], priorities: Sequence[int]) -> list[str]:
        """Adds requests and computes nothing yet; their ids."""
        with self._lock:
            request_ids = self._add(admitted, priorities)
            self._queued_id_to_output |= dict.fromkeys(request_ids)
            return request_ids

    def wait(self, use_tqdm: UseTqdm) -> list[Output]:
        """Outputs of all that is queued, in the order in which it was; afterwards nothing is."""
        with self._lock:
            queued, self._queued_id_to_output = self._queued_id_to_output, {}
            done = {request_id: output for request_id, output in queued.items() if output is not None}
            waited_for = [request_id for request_id in queued if request_id not in done]
            for output in self._finish(waited_for, use_tqdm):
                done[output.request_id] = output
        return [done[request_id] for request_id in queued]

    def _add(self, admitted: Sequence[AdmittedRequest | AdmittedPooling], priorities: Sequence[int]) -> list[str]:
        request_ids: list[str] = []
        try:
            for request, priority in zip(admitted, priorities, strict=True):
                request_ids.append(str(next(self._numbers)))
                self._add_one(request_ids[-1], request, priority)
        except BaseException:
            self._engine.abort_request(request_ids)
            raise
        return request_ids

    def _add_one(self, request_id: str, request: AdmittedRequest | AdmittedPooling, priority: int) -> None:
        if isinstance(request, AdmittedRequest):
            self._engine.add_request(request_id, request, request.sampling_params, priority=priority)
        else:
            self._engine.add_pooling_request(request_id, request, request.pooling_params, priority=priority)

    def _finish(self, request_ids: Sequence[str], use_tqdm: UseTqdm) -> list[Output]:
        request_id_to_output: dict[str, Output | None] = dict.fromkeys(request_ids)
        num_left = len(request_ids)
        try:
            with contextlib.ExitStack() as stack:
                bar = _Progress(stack.enter_context(_bar(use_tqdm, num_left))) if use_tqdm else None
                while num_left and self._engine.has_unfinished_requests():
                    for output in self._step():
                        if output.request_id not in request_id_to_output:
                            continue
                        request_id_to_output[output.request_id] = output
                        num_left -= 1
                        if bar is not None:
                            bar.update(output)
        finally:  # interrupted: leave nothing behind that the next call would go on with
            self._engine.abort_request([one for one, output in request_id_to_output.items() if output is None])
        return [output for output in request_id_to_output.values() if output is not None]

    def _step(self) -> list[Output]:
        """Outputs that one step has finished; those of queued requests are kept as well."""
        finished = [output for output in self._engine.step() if output.finished]
        for output in finished:
            if output.request_id in self._queued_id_to_output:
                self._queued_id_to_output[output.request_id] = output
        return finished


def one_each(
    param: str, given: GivenT | Sequence[GivenT], kind: type[GivenT], num_prompts: int, noun: str
) -> list[GivenT]:
    """One value per prompt, where one for all may be given; `noun` is the plural of what they are.

    Raises:
        InvalidRequestError: There are more or fewer than prompts, or one is of another type.
    """
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, list | tuple):
        raise request_errors.invalid_type(param, f"{kind.__name__} or a list of them", given)
    if len(given) != num_prompts:
        raise request_errors.invalid_value(param, f"{len(given)} {noun} for {num_prompts} prompts")
    wrong = next((index for index, one in enumerate(given) if not isinstance(one, kind)), None)
    if wrong is not None:
        raise request_errors.invalid_type(f"{param}[{wrong}]", kind.__name__, given[wrong])
    return list(given)


def priority_list(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
    """One priority per prompt, lower ones first; None is 0 for all.

    Raises:
        InvalidRequestError: There are more or fewer, or one is no integer of 32 bits.
    """
    if priority is None:
        return [0] * num_prompts
    if len(priority) != num_prompts:
        raise request_errors.invalid_value("priority", f"{len(priority)} priorities for {num_prompts} prompts")
    for index, one in enumerate(priority):
        if type(one) is not int or not -INT32_MAX <= one <= INT32_MAX:
            raise request_errors.invalid_value(f"priority[{index}]", "expected an integer of 32 bits")
    return list(priority)


class _Progress:
    """Counts prompts; shows tokens per second of both directions beside the bar."""

    def __init__(self, bar: tqdm[object]) -> None:
        self._bar = bar
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def update(self, output: Output) -> None:
        """One prompt is done."""
        self._num_prompt_tokens += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed_s = self._bar.format_dict.get("elapsed") or 1e-9
        rates = (self._num_prompt_tokens / elapsed_s, self._num_output_tokens / elapsed_s)
        self._bar.set_postfix_str("input {:.2f} toks/s, output {:.2f} toks/s".format(*rates), refresh=False)
        self._bar.update(1)


def _bar(use_tqdm: UseTqdm, total: int) -> tqdm[Any]:
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)


def prompt_list(prompts: Any) -> list[PromptInput]:
    """One prompt becomes a list of one; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [list(prompts)]
    return list(prompts)
