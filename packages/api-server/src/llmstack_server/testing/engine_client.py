"""A fake engine front end that repeats its prompts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from llmstack_llm import (
    AdmissionLimits,
    AsyncLLM,
    ChatPrompt,
    CheckedSampling,
    CompletionOutput,
    GenerationRequest,
    GenerationStream,
    GivenSampling,
    Logprob,
    PoolingRequestOutput,
    PromptInput,
    RenderedPrompt,
    RequestObserver,
    RequestOutput,
    SubmittedRequest,
    check_fan_out,
)
from llmstack_llm.admission.rules import check_token_ids
from llmstack_llm.admission.sampling import NO_NAMES, NO_SAMPLING, check_sampling, resolve_max_tokens
from llmstack_llm.chat.renderers import ChatFacts
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.media.processor import MediaStats
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.reloading import ReloadError
from llmstack_llm.requests import Adapter, AdmittedRequest
from llmstack_llm.speech.served import Speech
from llmstack_server.chat.parsers import choose_parsers
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig, ServeConfig
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing.adapters import FakeAdapters
from llmstack_server.testing.byte_tokenizer import ByteTokenizer
from llmstack_server.testing.operations import FakeOperations
from llmstack_server.testing.pooling import admit_bytes, pool_bytes
from llmstack_server.web.streams import close, merge
from llmstack_types import EngineDeadError, EngineReady, PoolingParams, RequestOutputKind, SamplingParams

READY = EngineReady(
    num_blocks=64, block_size=16, max_model_len=128, vocab_size=256, dtype="float32", device="cpu", embedding_size=4
)
LIMITS = AdmissionLimits(READY.max_model_len, READY.vocab_size, READY.num_blocks * READY.block_size, embedding_size=4)


class FakeStream(GenerationStream):
    """Outputs of prompts that were submitted together, which run as they are read."""

    def __init__(self, prompts: Sequence[AdmittedRequest], outputs: AsyncIterator[tuple[int, RequestOutput]]) -> None:
        self.prompts = prompts
        self._outputs = outputs
        self._take: Callable[[RequestOutput], bool] = lambda output: False
        self._limit: tuple[float | None, Exception] = (None, Exception())

    def fail_after(self, timeout_s: float, error: Exception) -> None:
        self._limit = (asyncio.get_running_loop().time() + timeout_s, error)

    def follow(self, take: Callable[[RequestOutput], bool]) -> None:
        self._take = take

    async def __anext__(self) -> RequestOutput:
        try:
            async with asyncio.timeout_at(self._limit[0]):
                while True:
                    index, output = await anext(self._outputs)
                    output.prompt_index = index
                    if output.finished or not self._take(output):
                        return output
        except TimeoutError:
            raise self._limit[1] from None

    async def aclose(self, *exc_info: object) -> None:
        """Closes the outputs, which aborts unfinished requests."""
        await close(self._outputs)

    __aexit__ = aclose


class FakeEngineClient(FakeAdapters, FakeOperations, AsyncLLM):
    """An `AsyncLLM` that repeats the prompt, one byte per token, and has no engine core.

    Nothing of `AsyncLLM` itself runs: what the routes call is here.

    Attributes:
        admitted: Prompts that were submitted.
        aborted_request_ids: Requests whose stream was closed before its end.
        step_delay_s: Seconds per token.
        script: Text to generate in place of the prompt.
        rendered: The conversations that were rendered.
        is_recovering: Value for `/ready`.
        num_restarts: Value for `/server_info`.
        num_cached_tokens: Value of each output.
        error: Raised in a stream when `num_tokens_before_error` tokens have come.
    """

    # Set for each engine below, and by tests; properties of an `AsyncLLM`.
    ready: EngineReady
    limits = LIMITS
    engines: Sequence[EngineReady] = (READY,)
    prompt_prefixes: Mapping[str, str] = {"query": "q: "}
    label_names: Mapping[int, str] = {}
    chat_template = ChatTemplate("{{ messages }}")
    chat_facts: ChatFacts | None = ChatFacts(True, True, None)
    media_stats: MediaStats | None = None
    speech: Speech | None = None
    sleep_level = 0
    is_recovering = is_exchanging = False
    num_restarts = num_unmoved_requests = num_finishing_requests = 0

    def __init__(self, *, step_delay_s: float = 0.0, num_labels: int = 0, token_names: Sequence[str] = ()) -> None:
        """`num_labels` above 0 makes it a classifier of `a`, `b` and so on; `token_names` as in `ByteTokenizer`."""
        self._token_names = token_names
        FakeAdapters.__init__(self)
        FakeOperations.__init__(self)
        self.ready = dataclasses.replace(READY, num_labels=num_labels)
        self.limits = dataclasses.replace(LIMITS, num_labels=num_labels)
        self.label_names = {index: chr(ord("a") + index) for index in range(num_labels)}
        self.admitted: list[AdmittedRequest] = []
        self.pooling_adapter: Adapter | None = None
        self.aborted_request_ids: list[str] = []
        self.step_delay_s = step_delay_s
        self.script: str | None = None
        self.rendered: list[ChatPrompt] = []
        self.observers: list[RequestObserver] = []
        self.error: Exception | None = None
        self.num_tokens_before_error = self.num_cached_tokens = 0
        self.num_running = self.max_num_running = 0
        self.is_dead = False
        self.is_shut_down = False
        self.readiness = asyncio.Event()
        self.readiness.set()

    async def wait_until_ready(self) -> EngineReady:
        """Returns once `readiness` is set."""
        await self.readiness.wait()
        return self.ready

    async def reload(self, *args: object, **options: object) -> tuple[EngineReady, int]:
        """Refuses: there is no engine core to exchange."""
        raise ReloadError("this engine cannot exchange its engine core")

    async def check_health(self) -> None:
        """Raises EngineDeadError once `is_dead`."""
        if self.is_dead:
            raise EngineDeadError("the fake engine is dead")

    def add_observer(self, observer: RequestObserver) -> None:
        self.observers.append(observer)

    def check_sampling(
        self, given: Mapping[str, object], names: Mapping[str, str] = NO_NAMES, *, is_echo: bool = False
    ) -> CheckedSampling:
        """Runs the real checks, with vLLM's defaults."""
        return check_sampling(given, self.limits, names, is_echo=is_echo)

    def _checked(self, sampling: GivenSampling | CheckedSampling) -> CheckedSampling:
        if isinstance(sampling, CheckedSampling):
            return sampling
        return self.check_sampling(sampling.values, sampling.names, is_echo=sampling.is_echo)

    def _admit(self, request: GenerationRequest, sampling: CheckedSampling) -> AdmittedRequest:
        """Runs the real checks on the bytes of the prompt."""
        prompt, param = request.prompt, request.param
        text = prompt.text if isinstance(prompt, RenderedPrompt) else prompt if isinstance(prompt, str) else None
        token_ids: Any = list(text.encode()) if text is not None else prompt
        check_token_ids(param, token_ids, LIMITS.vocab_size)
        max_tokens = resolve_max_tokens(
            sampling, len(token_ids), LIMITS, param=param, default_max_tokens=request.default_max_tokens
        )
        params = SamplingParams(**{**sampling.values, "max_tokens": max_tokens})
        return AdmittedRequest(text, token_ids, params, param, request.adapter)

    async def admit_pooling(
        self, prompt: PromptInput, pooling_params: PoolingParams, *, adapter: Adapter | None = None, **options: Any
    ) -> AdmittedPooling:
        """Runs the real checks on the bytes of the prompt."""
        self.pooling_adapter = adapter
        param, param_names = options.get("param", "prompt"), options.get("param_names")
        return admit_bytes(prompt, pooling_params, self.limits, param, param_names)

    @property
    def running_request_ids(self) -> list[str]:
        """None: this engine does not know them."""
        return []

    async def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends nothing, since it knows no ids."""

    def check_room(self, num_completions: int, num_prompt_tokens: int, tenant: str = "", param: str = "n") -> None:
        """Has room for any number of prompts."""

    async def encode(
        self,
        prompt: PromptInput | AdmittedPooling,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        has_room: bool = False,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The prompt's length, first, greatest and last byte, as far as `dimensions` or labels go."""
        if not isinstance(prompt, AdmittedPooling):
            raise TypeError("this engine pools admitted prompts alone")
        await self.check_health()
        submitted = SubmittedRequest(request_id, prompt.prompt, prompt.prompt_token_ids, prompt.pooling_params)
        for observer in self.observers:
            observer.on_submitted(submitted)
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
        for observer in self.observers:
            observer.on_pooled(request_id)
            observer.on_finished(request_id, None)
        numbers = pool_bytes(prompt, self.limits.num_labels)
        yield PoolingRequestOutput(request_id, prompt.prompt, prompt.prompt_token_ids, numbers)

    async def render(self, chat: ChatPrompt, sampling: GivenSampling | CheckedSampling = NO_SAMPLING) -> RenderedPrompt:
        """The contents, joined by newlines."""
        checked = self._checked(sampling)
        self.rendered.append(chat)
        text = "\n".join(str(message.get("content")) for message in chat.messages)
        return RenderedPrompt(text, list(text.encode()), checked)

    async def tokenize(self, text: str, *, param: str = "prompt", **options: bool) -> list[int]:
        return ByteTokenizer().encode(text)

    async def detokenize(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        return ByteTokenizer().decode(token_ids)

    async def submit(self, *requests: GenerationRequest) -> FakeStream:
        """Repeats each prompt until `max_tokens`, or generates the script; nothing runs before the iteration."""
        await self.check_health()
        sampling = self._checked(requests[0].sampling)
        check_fan_out(len(requests), sampling.num_generated, LIMITS)
        prompts = [self._admit(request, sampling) for request in requests]
        on_admitted = requests[0].on_admitted
        if on_admitted is not None:
            on_admitted(prompts, sampling.num_generated)
        self.admitted += prompts
        for request, one in zip(requests, prompts, strict=True):
            submitted = SubmittedRequest(request.request_id, one.prompt, one.prompt_token_ids, one.sampling_params)
            for observer in self.observers:
                observer.on_submitted(submitted)
        runs = [self._run(request.request_id, one) for request, one in zip(requests, prompts, strict=True)]
        return FakeStream(prompts, merge(runs))

    async def _run(self, request_id: str, prompt: AdmittedRequest) -> AsyncIterator[RequestOutput]:
        error: Exception | None = None
        try:
            async for output in self._outputs(request_id, prompt):
                for observer in self.observers:
                    observer.on_output(output)
                yield output
        except Exception as raised:  # reported to observers, and raised again
            error = raised
            raise
        finally:
            for observer in self.observers:
                observer.on_finished(request_id, error)

    async def _outputs(self, request_id: str, prompt: AdmittedRequest) -> AsyncIterator[RequestOutput]:
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
        shown, named = params.logprobs, params.logprob_token_ids or ()
        completions = [
            CompletionOutput(
                index=index,
                text=ByteTokenizer().decode(token_ids),
                token_ids=token_ids,
                logprobs=None if shown is None else [_position(one, shown, named) for one in token_ids],
                finish_reason=self._finish_reason(params) if is_finished else None,
            )
            for index in range(params.n)
        ]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if is_first and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(_position(one, params.prompt_logprobs) for one in prompt.prompt_token_ids[1:])]
        return RequestOutput(
            request_id,
            prompt.prompt,
            prompt.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=is_finished,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _finish_reason(self, params: SamplingParams) -> str:
        is_whole = self.script is not None and len(self.script.encode()) < (params.max_tokens or 0)
        return "stop" if is_whole else "length"

    async def get_tokenizer(self, param: str = "prompt") -> ByteTokenizer:
        return ByteTokenizer(self._token_names)

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        return [], False

    async def shutdown(self) -> None:
        self.is_shut_down = True


def _position(token_id: int, num_top: int, named: Sequence[int] = ()) -> dict[int, Logprob]:
    others = [other for other in named or (*range(65, 256), *range(65)) if other != token_id][: len(named) or num_top]
    found = {token_id: Logprob(-0.5, 1, ByteTokenizer().text_of(token_id), bytes([token_id]))}
    return found | {other: Logprob(-1.5 - k, k + 2, ByteTokenizer().text_of(other)) for k, other in enumerate(others)}


def ready_state(
    engine: AsyncLLM,
    http: HTTPConfig | None = None,
    names: Sequence[str] = ("fake",),
    ready: EngineReady = READY,
    *,
    chat: ChatOptions | None = None,
    chat_template: str | None = None,
) -> ServerState:
    """The state of a server that is ready, with `engine`; `chat_template` determines its parsers."""
    chat = chat or ChatOptions()
    config = ServeConfig(model="fake", served_model_names=tuple(names), http=http or HTTPConfig(), chat=chat)
    metrics = ServerMetrics(names[0], has_aliases=config.http.has_metrics_aliases)
    state = ServerState(config, engine, metrics, ready=ready, chat_parsers=choose_parsers(chat, chat_template))
    for step in (LifecycleState.LOADING_MODEL, LifecycleState.INITIALIZING_ENGINE, LifecycleState.READY):
        state.lifecycle.advance(step)
    return state
