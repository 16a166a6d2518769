"""What the routes need of an engine front end, by shape; `llmstack_llm.AsyncLLM` satisfies it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from llmstack_types import EngineReady, PoolingParams, SamplingParams, StepRecording


class TokenLogprob(Protocol):
    """One token's log-probability and its text."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def decoded_token(self) -> str | None: ...


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
    """When things happened to a prompt, in monotonic seconds; `llmstack_llm.RequestMetrics` has the meanings."""

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
    """What one prompt has brought, in whole or since the last time."""

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
    def metrics(self) -> Timings | None: ...


class AdmittedPrompt(Protocol):
    """A prompt and its parameters after every check."""

    @property
    def prompt(self) -> str | None: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def sampling_params(self) -> SamplingParams: ...


class AdmittedInput(Protocol):
    """A prompt to pool and its parameters after every check."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def pooling_params(self) -> PoolingParams: ...


class Numbers(Protocol):
    """What one prompt to pool has brought: a vector, several, or a number for each label."""

    @property
    def data(self) -> array[float]: ...
    def tolist(self) -> list[float] | list[list[float]]: ...
    def to_bytes(self) -> bytes: ...


class PooledOutput(Protocol):
    """What one prompt to pool has brought."""

    @property
    def outputs(self) -> Numbers: ...


class TextCodec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def text_of(self, token_id: int) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


class EngineClient(Protocol):
    """An engine front end seen from the routes; used on one event loop.

    Prompts are passed through unread (`Any`): what `render_chat` returns goes into `admit`, what `admit` returns into
    `generate`.
    """

    async def wait_until_ready(self) -> EngineReady:
        """Raises EngineStartError, EngineDeadError."""
        ...

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine core is gone."""
        ...

    @property
    def is_recovering(self) -> bool:
        """True while another engine core takes the place of one that died; requests wait for it."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often that has happened."""
        ...

    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults; `max_tokens` None means what the context has left."""
        ...

    async def admit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        *,
        param: str = "prompt",
        is_echo: bool = False,
        param_names: Mapping[str, str] = ...,
        default_max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> AdmittedPrompt:
        """Tokenizes and checks.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        ...

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
    ) -> Any:
        """The prompt of a conversation.

        Raises:
            InvalidRequestError: The template refuses it.
        """
        ...

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[PromptOutput]:
        """Streams outputs; leaving the iteration aborts the request.

        Raises:
            ServerOverloadedError: Too many requests are waiting.
            RequestFailedError: This request failed.
            EngineDeadError: The engine core is gone.
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
    ) -> AdmittedInput:
        """Tokenizes and checks.

        Raises:
            InvalidRequestError: Names the first field at fault.
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
    ) -> AsyncIterator[PooledOutput]:
        """A stream of one output; raises as `generate`."""
        ...

    @property
    def prompt_prefixes(self) -> Mapping[str, str]:
        """What the model wants before texts, by what they are for, as far as it says so."""
        ...

    @property
    def label_names(self) -> Mapping[int, str]:
        """What a classifier calls its labels, as far as it does."""
        ...

    async def get_tokenizer(self, param: str = "prompt") -> TextCodec:
        """Raises InvalidRequestError, which names `param`, when started without one."""
        ...

    @property
    def engines(self) -> Sequence[EngineReady]:
        """What each engine core said when it was ready."""
        ...

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake."""
        ...

    async def current_sleep_level(self) -> int:
        """`sleep_level`, asked for: another process may have changed it a moment ago."""
        ...

    async def sleep(self, level: int) -> bool:
        """Gives the KV storage back, and with level 2 the weights too; False while requests are running."""
        ...

    async def wake_up(self) -> None:
        """Brings back what `sleep` gave back."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """False while requests are running."""
        ...

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """The last steps after number `after_step` and the last events, as far as that engine core keeps them."""
        ...

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        """Ids of the requests without progress for so long, and whether the engine core itself stands still."""
        ...

    async def shutdown(self) -> None:
        """Stops everything. Idempotent."""
        ...
