"""Protocols of an engine front end, which `llmstack_llm.AsyncLLM` satisfies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from llmstack_llm import (
    ChatPrompt,
    CheckedSampling,
    EngineArgs,
    GenerationRequest,
    GivenSampling,
    RenderedPrompt,
    RequestObserver,
)
from llmstack_llm.adapters import AdapterRegistry, OnChange
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.chat.renderers import ChatFacts
from llmstack_llm.media.processor import MediaStats
from llmstack_llm.pooling.scoring import Pooled
from llmstack_llm.requests import Adapter
from llmstack_llm.speech.served import Speech
from llmstack_types import EngineReady, Operation, PoolingParams, SamplingParams, StepRecording
from llmstack_types.control import ArgumentTs, ResultT
from llmstack_types.vocabulary import MediaKind


class TokenLogprob(Protocol):
    """One token's log-probability and its text."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def decoded_token(self) -> str | None: ...
    @property
    def token_bytes(self) -> bytes | None: ...


class Completion(Protocol):
    """One completion of a prompt, or what is new in it."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, TokenLogprob]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Timings(Protocol):
    """Times of a prompt in monotonic seconds, as in `llmstack_llm.RequestMetrics`."""

    @property
    def arrival_time_s(self) -> float: ...
    @property
    def scheduled_time_s(self) -> float | None: ...
    @property
    def first_token_time_s(self) -> float | None: ...
    @property
    def last_token_time_s(self) -> float | None: ...
    @property
    def num_generation_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def scheduler_time_s(self) -> float: ...
    @property
    def model_time_s(self) -> float: ...


class PromptOutput(Protocol):
    """The output of one prompt, complete or since the last one."""

    @property
    def prompt_index(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_logprobs(self) -> Sequence[Mapping[int, TokenLogprob] | None] | None: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...
    @property
    def num_cached_tokens(self) -> int | None: ...
    @property
    def num_dropped_tokens(self) -> int: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def metrics(self) -> Timings | None: ...
    @property
    def engines(self) -> Sequence[EngineReady]: ...


class AdmittedPrompt(Protocol):
    """A prompt and its parameters after every check."""

    @property
    def prompt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def sampling_params(self) -> SamplingParams: ...
    @property
    def adapter(self) -> Adapter | None: ...
    def num_media_tokens(self, kind: MediaKind) -> int: ...


class OutputStream(Protocol):
    """Outputs of the prompts that were submitted together; closing it aborts what has not ended."""

    @property
    def prompts(self) -> Sequence[AdmittedPrompt]: ...
    def __aiter__(self) -> AsyncIterator[PromptOutput]: ...
    async def __anext__(self) -> PromptOutput: ...
    async def aclose(self) -> None: ...
    def fail_after(self, timeout_s: float, error: Exception) -> None: ...
    def follow(self, take: Callable[[PromptOutput], bool]) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc_info: object) -> None: ...


class AdmittedInput(Protocol):
    """A pooling prompt and its parameters after every check."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def pooling_params(self) -> PoolingParams: ...


class Numbers(Pooled, Protocol):
    """The numbers of one pooling prompt: a vector, several vectors, or a number per label."""

    def tolist(self) -> list[float] | list[list[float]]: ...
    def to_bytes(self) -> bytes: ...


class PooledOutput(Protocol):
    """The output of one pooling prompt."""

    @property
    def outputs(self) -> Numbers: ...


class TextCodec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def text_of(self, token_id: int) -> str: ...
    def name_of(self, token_id: int) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


class EngineClient(Protocol):
    """An engine front end as the routes use it, on one event loop."""

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the engine core's READY; raises EngineStartError or EngineDeadError."""
        ...

    async def check_health(self) -> None:
        """Raises EngineDeadError once the engine core has ended."""
        ...

    @property
    def is_recovering(self) -> bool:
        """True while an engine core that ended is being replaced; requests wait meanwhile."""

    @property
    def num_restarts(self) -> int:
        """The number of engine cores that were replaced."""

    @property
    def num_unmoved_requests(self) -> int:
        """Requests of a lost engine core that waited, since the others compute different bits."""

    @property
    def limits(self) -> AdmissionLimits:
        """The limits of the running model."""

    @property
    def media_stats(self) -> MediaStats | None:
        """Counts of the pictures of requests; None for a model without."""

    @property
    def speech(self) -> Speech | None:
        """Windows and prompts of a model that transcribes; None for every other."""

    @property
    def chat_facts(self) -> ChatFacts | None:
        """What a page for chats offers; None for a model that does not chat."""

    @property
    def adapters(self) -> AdapterRegistry:
        """LoRA adapters that requests can name."""

    async def load_adapter(
        self, name: str, path: str, base_model_name: str | None = None, on_change: OnChange | None = None
    ) -> Adapter:
        """Loads an adapter under a name; raises InvalidRequestError if it cannot be served.

        `on_change` is awaited before one that had the name is unloaded.
        """
        ...

    async def unload_adapter(self, name: str, on_change: OnChange | None = None) -> bool:
        """Takes no further requests for an adapter; False if there is none of that name.

        `on_change` is awaited before it is unloaded.
        """
        ...

    def adapter_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of requests that run, and of those that wait."""

    def add_observer(self, observer: RequestObserver) -> None:
        """Reports every request submitted from now on to the observer."""
        ...

    def check_sampling(
        self, given: Mapping[str, Any], names: Mapping[str, str] = ..., *, is_echo: bool = False
    ) -> CheckedSampling:
        """Checks the sampling fields of a request alone, over the model's defaults.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        ...

    async def render(self, chat: ChatPrompt, sampling: GivenSampling | CheckedSampling = ...) -> RenderedPrompt:
        """Checks the sampling fields, then renders and tokenizes a conversation.

        Raises:
            InvalidRequestError: A sampling field is at fault, the template refuses it, or its text is too long.
            ServerOverloadedError: Too many long texts are waiting.
        """
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The tokens of a text; raises as `render`."""
        ...

    async def detokenize(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        """The text of token ids; raises as `render`."""
        ...

    async def submit(self, *requests: GenerationRequest) -> OutputStream:
        """Submits prompts, which share their sampling fields, all of them or none.

        Raises:
            InvalidRequestError: Names the field at fault.
            ServerOverloadedError: Too many requests are waiting.
            EngineDeadError: The engine core has ended.
        """
        ...

    async def admit_pooling(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        *,
        param: str = "prompt",
        param_names: Mapping[str, str] = ...,
        add_special_tokens: bool = True,
        adapter: Adapter | None = None,
    ) -> AdmittedInput:
        """Tokenizes and checks a pooling prompt.

        Raises:
            InvalidRequestError: Names the first invalid field.
        """
        ...

    @property
    def running_request_ids(self) -> Sequence[str]:
        """The ids of the requests that have not ended."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; their streams end with finish reason `abort`."""
        ...

    def check_room(self, num_completions: int, num_prompt_tokens: int, tenant: str = "", param: str = "n") -> None:
        """Checks that so many prompts may join the queue.

        Raises:
            ServerOverloadedError: The queue is full.
        """
        ...

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        has_room: bool = False,
    ) -> AsyncIterator[PooledOutput]:
        """A stream of one output; raises as `submit`."""

    @property
    def prompt_prefixes(self) -> Mapping[str, str]:
        """The prefixes that the model's folder configures, by purpose of the text."""

    @property
    def label_names(self) -> Mapping[int, str]:
        """The names of a classifier's labels, as far as its folder has them."""

    async def get_tokenizer(self, param: str = "prompt") -> TextCodec:
        """Raises InvalidRequestError, which names `param`, when started without one."""
        ...

    @property
    def engines(self) -> Sequence[EngineReady]:
        """The READY message of each engine core."""

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake."""
        ...

    async def current_sleep_level(self) -> int:
        """The sleep level as reported by the engine core, since another process may have changed it."""
        ...

    async def sleep(self, level: int) -> bool:
        """Frees the KV storage, and with level 2 the weights too; False while requests are running."""
        ...

    async def wake_up(self) -> None:
        """Allocates again what `sleep` has freed."""
        ...

    async def control(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Does an operation of the engine cores that needs nothing else."""
        ...

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """The last steps after `after_step` and the last events that the engine core keeps."""
        ...

    async def step_log(self, engine_index: int = 0) -> bytes:
        """The step log of that engine core; empty where it keeps none in memory."""
        ...

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        """Ids of the requests without progress for so long, and whether the engine core has stopped."""
        ...

    async def shutdown(self) -> None:
        """Stops the engine and frees its resources; a second call has no effect."""
        ...


@runtime_checkable
class ReloadableEngine(Protocol):
    """An engine front end that can exchange its engine core while requests run."""

    async def reload(
        self,
        args: EngineArgs | None = None,
        adapters: Sequence[tuple[str, str]] | None = None,
        *,
        moves: bool = False,
    ) -> tuple[EngineReady, int]:
        """Lets another engine core take new requests; None for `args` changes the adapters alone.

        `moves`: Running requests go on there, and the second value is their number.

        Raises:
            ReloadError: Nothing has changed; the text says why.
        """
        ...

    @property
    def num_finishing_requests(self) -> int:
        """Requests that finish in the engine core before this one."""
        ...

    @property
    def is_exchanging(self) -> bool:
        """Whether new requests wait for the next engine core, and will have its weights."""
        ...
