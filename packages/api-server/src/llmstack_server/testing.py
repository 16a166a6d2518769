"""A fake engine front end and a client without sockets: the API can be tested, and tried, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from llmstack_llm.admit import AdmissionLimits, AdmittedRequest, admit_request
from llmstack_llm.admit_pooling import AdmittedPooling
from llmstack_llm.outputs import CompletionOutput, Logprob, RequestOutput
from llmstack_llm.pooling_outputs import PoolingRequestOutput
from llmstack_server.chat.options import ChatOptions
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.config import HTTPConfig, ServeConfig
from llmstack_server.http.metrics import ServerMetrics
from llmstack_server.lifecycle import LifecycleState
from llmstack_server.pooling.testing import admit_bytes, pool_bytes
from llmstack_server.protocols import EngineClient
from llmstack_server.state import ServerState
from llmstack_server.testing_http import Answer, call, wait_until
from llmstack_types import (
    EngineDeadError,
    EngineReady,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StepRecording,
)

READY = EngineReady(
    num_blocks=64, block_size=16, max_model_len=128, vocab_size=256, dtype="float32", device="cpu", embedding_size=4
)
LIMITS = AdmissionLimits(READY.max_model_len, READY.vocab_size, READY.num_blocks * READY.block_size, embedding_size=4)


class ByteTokenizer:
    """A token is a byte."""

    config: Mapping[str, Any] = {"tokenizer_class": "ByteTokenizer"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the bytes."""
        return bytes(token_ids).decode("utf-8", "replace")

    def text_of(self, token_id: int) -> str:
        """One byte as text."""
        return self.decode([token_id])


class FakeEngineClient:
    """An `EngineClient` that repeats the prompt, one byte per token.

    Attributes:
        admitted: Everything that passed `admit`.
        aborted_request_ids: Requests whose stream was left before its end.
        step_delay_s: How long each token takes.
        script: What it says in place of the prompt, up to its end.
        rendered: The arguments of every `render_chat`.
        sleep_level: What `sleep` has set.
        is_recovering: What `/ready` is told.
        num_restarts: What `/server_info` is told.
        recording: What `recent_steps` gives.
        error: Raised by `generate` when `num_tokens_before_error` tokens have come.
    """

    def __init__(self, *, step_delay_s: float = 0.0, num_labels: int = 0) -> None:
        """`num_labels` above 0 makes it a classifier, whose labels are called `a`, `b` and so on."""
        self.ready = dataclasses.replace(READY, num_labels=num_labels)
        self.limits = dataclasses.replace(LIMITS, num_labels=num_labels)
        self.prompt_prefixes = {"query": "q: "}
        self.label_names = {index: chr(ord("a") + index) for index in range(num_labels)}
        self.admitted: list[AdmittedRequest] = []
        self.aborted_request_ids: list[str] = []
        self.step_delay_s = step_delay_s
        self.script: str | None = None
        self.rendered: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.num_tokens_before_error = 0
        self.num_running = self.max_num_running = 0
        self.is_dead = False
        self.is_shut_down = False
        self.sleep_level = 0
        self.is_recovering = False
        self.num_restarts = 0
        self.engines = [READY]
        self.recording = StepRecording(0.0, (), ())
        self.readiness = asyncio.Event()
        self.readiness.set()

    async def wait_until_ready(self) -> EngineReady:
        """Returns once `readiness` is set."""
        await self.readiness.wait()
        return self.ready

    async def check_health(self) -> None:
        """Raises EngineDeadError once `is_dead`."""
        if self.is_dead:
            raise EngineDeadError("the fake engine is dead")

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults."""
        return SamplingParams(max_tokens=None)

    async def admit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        param: str = "prompt",
        is_echo: bool = False,
        param_names: Mapping[str, str] | None = None,
        default_max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> AdmittedRequest:
        """The real checks over bytes."""
        text = prompt if isinstance(prompt, str) else None
        token_ids = list(text.encode()) if text is not None else prompt
        if isinstance(prompt, dict):
            text, token_ids = prompt["prompt"], prompt["prompt_token_ids"]
        admitted = admit_request(
            text,
            token_ids,
            sampling_params,
            LIMITS,
            param=param,
            param_names=param_names or {},
            default_max_tokens=default_max_tokens,
            is_echo=is_echo,
        )
        self.admitted.append(admitted)
        return admitted

    async def admit_pooling(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        *,
        param: str = "prompt",
        param_names: Mapping[str, str] | None = None,
        add_special_tokens: bool = True,
    ) -> AdmittedPooling:
        """The real checks over bytes."""
        return admit_bytes(prompt, pooling_params, self.limits, param, param_names)

    async def encode(
        self,
        prompt: AdmittedPooling,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[PoolingRequestOutput]:
        """The prompt's length, first, greatest and last byte, as far as `dimensions` or labels go."""
        await self.check_health()
        self.num_running += 1
        self.max_num_running = max(self.max_num_running, self.num_running)
        is_finished = False
        try:
            await asyncio.sleep(self.step_delay_s)
            self._maybe_fail(0)
            is_finished = True
        finally:
            self.num_running -= 1
            if not is_finished:
                self.aborted_request_ids.append(request_id)
        numbers = pool_bytes(prompt, self.limits.num_labels)
        yield PoolingRequestOutput(request_id, prompt.prompt, prompt.prompt_token_ids, numbers)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The contents, joined by newlines."""
        self.rendered.append(
            {"messages": messages, "tools": tools, "documents": documents, "chat_template": chat_template,
             "kwargs": chat_template_kwargs}
        )  # fmt: skip
        text = "\n".join(str(message.get("content")) for message in messages)
        return {"prompt": text, "prompt_token_ids": list(text.encode())}

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Repeats the prompt until `max_tokens`, or says the script."""
        await self.check_health()
        params: SamplingParams = prompt.sampling_params
        said = self._said(prompt)
        is_finished = False
        self.num_running += 1
        try:
            for position in range(len(said)):
                await asyncio.sleep(self.step_delay_s)
                self._maybe_fail(position)
                is_finished = position == len(said) - 1
                if params.output_kind is RequestOutputKind.DELTA:
                    yield self._output(request_id, prompt, said[position : position + 1], position == 0, is_finished)
            if params.output_kind is not RequestOutputKind.DELTA or not said:
                is_finished = True
                yield self._output(request_id, prompt, said, True, True)
        finally:
            self.num_running -= 1
            if not is_finished:
                self.aborted_request_ids.append(request_id)

    def _said(self, prompt: AdmittedRequest) -> list[int]:
        script = prompt.prompt_token_ids if self.script is None else list(self.script.encode())
        num_tokens = prompt.sampling_params.max_tokens or 0
        if self.script is not None:
            return script[:num_tokens]
        return [script[k % len(script)] for k in range(num_tokens)]

    def _maybe_fail(self, position: int) -> None:
        if self.is_dead:
            raise EngineDeadError("the fake engine is dead")
        if self.error is not None and position >= self.num_tokens_before_error:
            raise self.error

    def _output(
        self, request_id: str, prompt: AdmittedRequest, token_ids: list[int], is_first: bool, is_finished: bool
    ) -> RequestOutput:
        params = prompt.sampling_params
        completions = [
            CompletionOutput(
                index=index,
                text=ByteTokenizer().decode(token_ids),
                token_ids=token_ids,
                logprobs=None if params.logprobs is None else [_position(t, params.logprobs) for t in token_ids],
                finish_reason=self._finish_reason(params) if is_finished else None,
            )
            for index in range(params.n)
        ]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if is_first and params.prompt_logprobs is not None:
            rest = [_position(token_id, params.prompt_logprobs) for token_id in prompt.prompt_token_ids[1:]]
            prompt_logprobs = [None, *rest]
        return RequestOutput(
            request_id,
            prompt.prompt,
            prompt.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=0,
        )

    def _finish_reason(self, params: SamplingParams) -> str:
        is_whole = self.script is not None and len(self.script.encode()) < (params.max_tokens or 0)
        return "stop" if is_whole else "length"

    async def get_tokenizer(self, param: str = "prompt") -> ByteTokenizer:
        """A token is a byte."""
        return ByteTokenizer()

    async def current_sleep_level(self) -> int:
        """The same."""
        return self.sleep_level

    async def sleep(self, level: int) -> bool:
        """Refused while requests are running."""
        if self.num_running:
            return False
        self.sleep_level = max(level, self.sleep_level)
        return True

    async def wake_up(self) -> None:
        """Ends the sleep."""
        self.sleep_level = 0

    async def reset_prefix_cache(self) -> bool:
        """True while idle."""
        return self.num_running == 0

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """`recording`, from after that step on."""
        now_s, steps, events = self.recording
        return StepRecording(now_s, [record for record in steps if record.stats.step > after_step], events)

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        """None."""
        return [], False

    async def shutdown(self) -> None:
        """Ends it."""
        self.is_shut_down = True


def _position(token_id: int, num_top: int) -> dict[int, Logprob]:
    """The chosen token with -0.5, then the lowest ids with less."""
    others = [other for other in range(65, 65 + num_top + 1) if other != token_id][:num_top]
    found = {token_id: Logprob(-0.5, 1, ByteTokenizer().text_of(token_id))}
    return found | {other: Logprob(-1.5 - k, k + 2, ByteTokenizer().text_of(other)) for k, other in enumerate(others)}


def ready_state(
    engine: EngineClient,
    http: HTTPConfig | None = None,
    names: Sequence[str] = ("fake",),
    ready: EngineReady = READY,
    *,
    chat: ChatOptions | None = None,
    chat_template: str | None = None,
) -> ServerState:
    """The state of a server that has come up over `engine`; `chat_template` tells which parsers it has."""
    chat = chat or ChatOptions()
    config = ServeConfig(model="fake", served_model_names=tuple(names), http=http or HTTPConfig(), chat=chat)
    metrics = ServerMetrics(names[0], has_aliases=config.http.has_metrics_aliases)
    state = ServerState(config, engine, metrics, ready=ready, chat_parsers=choose_parsers(chat, chat_template))
    for step in (LifecycleState.LOADING_MODEL, LifecycleState.INITIALIZING_ENGINE, LifecycleState.READY):
        state.lifecycle.advance(step)
    return state


__all__ = ["LIMITS", "READY", "Answer", "ByteTokenizer", "FakeEngineClient", "call", "ready_state", "wait_until"]
