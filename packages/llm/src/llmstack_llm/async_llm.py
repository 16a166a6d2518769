"""The engine front end for servers: admits requests, runs the output loop, and gives each caller its own stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmstack_llm.admit import AdmittedRequest
    from llmstack_llm.engine_args import EngineArgs
    from llmstack_llm.input_processor import PromptInput
    from llmstack_llm.model_config import ModelConfig
    from llmstack_llm.outputs import RequestOutput
    from llmstack_llm.protocols import AsyncEngineCoreClient
    from llmstack_llm.stats import StatLogger
    from llmstack_llm.tokenizer import Tokenizer
    from llmstack_types import EngineReady, SamplingParams


class AsyncLLM:
    """Signatures first; bodies follow."""

    model_config: ModelConfig
    ready: EngineReady | None

    def __init__(
        self,
        model_config: ModelConfig,
        client: AsyncEngineCoreClient,
        tokenizer: Tokenizer | None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        chat_template: str | None = None,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        raise NotImplementedError

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> AsyncLLM:
        """Starts the engine-core process and returns without waiting for it."""
        raise NotImplementedError

    async def admit(
        self, prompt: PromptInput, sampling_params: SamplingParams, *, param: str = "prompt", is_echo: bool = False
    ) -> AdmittedRequest:
        """Tokenizes and checks; raises InvalidRequestError. `AdmittedRequest(prompt, prompt_token_ids, sampling_params)`."""
        raise NotImplementedError

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`{"prompt": text, "prompt_token_ids": ids}`, which `admit` and `generate` take; raises InvalidRequestError."""
        raise NotImplementedError

    def generate(
        self,
        prompt: PromptInput | AdmittedRequest,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Streams the request's outputs; leaving the iteration aborts it."""
        raise NotImplementedError

    async def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; their streams end with `finish_reason` abort."""
        raise NotImplementedError

    async def wait_until_ready(self) -> EngineReady:
        """Raises EngineStartError, EngineDeadError."""
        raise NotImplementedError

    @property
    def state(self) -> str:
        """`starting`, `ready` or `dead`."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """State is ready."""
        raise NotImplementedError

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine core is gone."""
        raise NotImplementedError

    async def get_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError when started without one."""
        raise NotImplementedError

    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json) over vLLM's; `max_tokens` None: what the context has left."""
        raise NotImplementedError

    async def reset_prefix_cache(self) -> bool:
        """False while requests are running."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Stops everything. Idempotent."""
        raise NotImplementedError
