"""The engine front end for servers: admits requests, runs the output loop, and gives each caller its own stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmstack_llm import request_errors
from llmstack_llm.admit import AdmittedRequest
from llmstack_llm.admit_pooling import AdmittedPooling
from llmstack_llm.chat_renderers import ChatRenderers
from llmstack_llm.chat_template import ChatTemplate, find_chat_template
from llmstack_llm.engine_args import EngineArgs, UsageContext
from llmstack_llm.engine_clients import make_engine_client
from llmstack_llm.engine_front_end import EngineFrontEnd
from llmstack_llm.input_processor import MAX_CHARS_ON_LOOP, InputProcessor, PromptInput
from llmstack_llm.model_config import ModelConfig
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs import RequestOutput
from llmstack_llm.pooling_outputs import PoolingRequestOutput
from llmstack_llm.stats import StatLogger
from llmstack_llm.structured_outputs import StructuredOutputsConfig, read_structured_outputs_config
from llmstack_llm.tokenizer import Tokenizer, load_tokenizer
from llmstack_types import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from llmstack_llm.output_collector import RequestOutputCollector
    from llmstack_llm.protocols import AsyncEngineCoreClient

logger = logging.getLogger(__name__)

MAX_VALUES_ON_LOOP = 1024
"""Messages, parts and fields of a conversation; more are rendered on a thread."""


class AsyncLLM(EngineFrontEnd):
    """One model behind one or several engine cores, for many callers on one event loop.

    May be constructed outside of a loop; the loop of the first call is the one that uses it.

    Attributes:
        tokenizer: None where token ids go in and out.
        chat_template: What renders conversations; `is_fallback` where the model has no template.
        load_tokenizer_s: Seconds that reading the tokenizer has taken; 0 where the caller has read it.
    """

    load_tokenizer_s: float = 0.0

    def __init__(
        self,
        model_config: ModelConfig,
        client: AsyncEngineCoreClient,
        tokenizer: Tokenizer | None,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        chat_template: str | ChatTemplate | None = None,
        chat_template_content_format: str = "auto",
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        trace: bool = False,
        structured_outputs: StructuredOutputsConfig | None = None,
    ) -> None:
        input_class, output_class = processor_classes(trace)
        super().__init__(
            model_config,
            client,
            input_class(model_config, tokenizer, structured_outputs=structured_outputs or StructuredOutputsConfig()),
            output_class(tokenizer),
            stat_loggers,
            max_num_queued_reqs,
            max_num_queued_tokens,
        )
        self.tokenizer = tokenizer
        self.chat_template = load_chat_template(model_config, tokenizer, chat_template)
        self._renderers: ChatRenderers | None = None
        if tokenizer is not None:
            self._renderers = ChatRenderers(self.chat_template, tokenizer, content_format=chat_template_content_format)

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        multiprocess: bool = True,
        client_addresses: Sequence[str] = (),
        client_index: int = 0,
    ) -> AsyncLLM:
        """Starts the engine cores, or attaches to running ones, and returns without waiting for them.

        `multiprocess`: Whether the engine core gets a process of its own, or a thread of this one.
        `client_addresses`: Where engine cores run that somebody else has started; they stay when this one leaves.
        `client_index`: Which of several front ends of one server this is.

        Raises:
            EngineArgsError, ModelConfigError, ModelFilesError, TokenizerError: The options or the folder are unusable.
            EngineStartError: A process cannot be started, or an address is unusable.
        """
        model_config, engine_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        began_s = time.monotonic()
        tokenizer = None if model_config.tokenizer_path is None else load_tokenizer(model_config.tokenizer_path)
        load_tokenizer_s = time.monotonic() - began_s
        # A broken one is refused before a process exists.
        chat_template = load_chat_template(model_config, tokenizer, args.chat_template)
        engine = cls(
            model_config,
            make_engine_client(engine_config, multiprocess, client_addresses, client_index),
            tokenizer,
            stat_loggers=stat_loggers,
            chat_template=chat_template,
            chat_template_content_format=args.chat_template_content_format,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            trace=args.trace,
            structured_outputs=read_structured_outputs_config(args.structured_outputs_config),
        )
        engine.load_tokenizer_s = load_tokenizer_s
        return engine

    async def admit(self, prompt: PromptInput, sampling_params: SamplingParams, **options: Any) -> AdmittedRequest:
        """Tokenizes and checks one prompt, so that a server can refuse it before it answers.

        `options`: Those of `InputProcessor.admit`, such as `param` and `default_max_tokens`.

        Raises:
            InvalidRequestError: Names the field at fault.
        """
        return await self.input_processor.admit_async(prompt, sampling_params, **options)

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
        """A conversation as `{"prompt": text, "prompt_token_ids": ids}`, which `admit` and `generate` take.

        Raises:
            InvalidRequestError: Names the message and the field at fault.
        """
        renderers = self._renderers
        if renderers is None:
            raise request_errors.unsupported_value("messages", "this server has no tokenizer")

        def render() -> tuple[str, list[int]]:
            return renderers.pick(has_tools=bool(tools), chat_template=chat_template).render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                template_kwargs=chat_template_kwargs,
            )

        # A template of the request's own may have to be compiled.
        is_slow = chat_template is not None or _is_long(messages, tools, documents)
        text, token_ids = await asyncio.to_thread(render) if is_slow else render()
        return {"prompt": text, "prompt_token_ids": token_ids}

    async def generate(
        self,
        prompt: PromptInput | AdmittedRequest,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams one request's outputs; whoever leaves the iteration, or is cancelled in it, aborts the request.

        `sampling_params`: None takes the model's defaults; not looked at where `prompt` is admitted already.

        Raises:
            InvalidRequestError: The request cannot be served, or the id is in use.
            ServerOverloadedError: Too many completions are in flight.
            EngineDeadError: The engine core is gone.
            RequestFailedError: This request failed inside the engine.
        """
        collector = await self._add_request(prompt, sampling_params, request_id, priority, cache_salt)
        is_finished = False
        try:
            while not is_finished:
                output = collector.get_nowait() or await collector.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                self._abort_in_background(self.output_processor.abort_requests([request_id], is_silent=True))

    async def admit_pooling(
        self, prompt: PromptInput, pooling_params: PoolingParams, **options: Any
    ) -> AdmittedPooling:
        """`admit` for a prompt to pool; the options are those of `InputProcessor.admit_pooling`.

        Waits until the engine core is ready: only it knows what vectors the model has.

        Raises:
            InvalidRequestError: Names the field at fault.
            EngineStartError, EngineDeadError: The engine core is not there.
        """
        await self.wait_until_ready()
        return await self.input_processor.admit_pooling_async(prompt, pooling_params, **options)

    async def encode(
        self,
        prompt: PromptInput | AdmittedPooling,
        pooling_params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pools one prompt: a stream of one output. Whoever leaves the iteration before aborts the request.

        `pooling_params`: None pools as the model was trained for; not looked at where `prompt` is admitted already.

        Raises:
            InvalidRequestError, ServerOverloadedError, EngineDeadError, RequestFailedError: As `generate`.
        """
        await self.wait_until_ready()
        if not isinstance(prompt, AdmittedPooling):
            prompt = await self.admit_pooling(prompt, pooling_params or PoolingParams())
        self._check_alive()
        self._check_room(1, len(prompt.prompt_token_ids))
        request = self.input_processor.process_pooling(request_id, prompt, priority=priority, cache_salt=cache_salt)
        collector = self.output_processor.add_pooling_request(prompt.prompt, request)
        is_finished = False
        try:
            self._start_output_loop()
            await self._client.add_request(request)
            output = await collector.get()
            is_finished = True
            yield output
        finally:
            if not is_finished:
                self._abort_in_background(self.output_processor.abort_requests([request_id], is_silent=True))

    async def get_tokenizer(self, param: str = "prompt") -> Tokenizer:
        """The tokenizer; raises InvalidRequestError, which names `param`, where there is none."""
        if self.tokenizer is None:
            raise request_errors.unsupported_value(param, "this server has no tokenizer")
        return self.tokenizer

    @property
    def prompt_prefixes(self) -> Mapping[str, str]:
        """What the model wants before texts, by what they are for, as far as its folder says so."""
        return self.model_config.pooling.prompts

    @property
    def label_names(self) -> Mapping[int, str]:
        """What a classifier calls its labels, as far as it does."""
        return self.model_config.label_names

    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults over vLLM's; `max_tokens` None unless the model sets one."""
        return self.model_config.default_sampling_params()

    async def _add_request(
        self,
        prompt: PromptInput | AdmittedRequest,
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int,
        cache_salt: str,
    ) -> RequestOutputCollector:
        self._check_alive()
        await self.wait_until_ready()
        if not isinstance(prompt, AdmittedRequest):
            prompt = await self.admit(prompt, sampling_params or self.default_sampling_params())
        self._check_alive()
        self._check_room(prompt.sampling_params.num_generated, len(prompt.prompt_token_ids))
        requests = self.input_processor.process_inputs(request_id, prompt, priority=priority, cache_salt=cache_salt)
        # Registered first: an output can never arrive for a request that is not known here.
        collector = self.output_processor.add_request(request_id, prompt.prompt, requests, prompt.sampling_params)
        self._start_output_loop()
        await self._send(request_id, requests)
        return collector


def processor_classes(trace: bool) -> tuple[type[InputProcessor], type[OutputProcessor]]:
    """The processors, or those that print what passes through them."""
    if not trace:
        return InputProcessor, OutputProcessor
    from llmstack_llm.trace import TracedInputProcessor, TracedOutputProcessor

    return TracedInputProcessor, TracedOutputProcessor


def load_chat_template(
    model_config: ModelConfig, tokenizer: Tokenizer | None, override: str | ChatTemplate | None
) -> ChatTemplate:
    """The model's template, the override, or the plain fallback, which is said in the log.

    Raises:
        ChatTemplateError: The template cannot be used.
    """
    if isinstance(override, ChatTemplate):
        return override
    config = {} if tokenizer is None else tokenizer.config
    source = find_chat_template(model_config.tokenizer_path, config, override=override)
    if source is None and tokenizer is not None:
        logger.warning("the model has no chat template: messages are joined by newlines (chat_template sets one)")
    tool_source = find_chat_template(model_config.tokenizer_path, config, override=override, has_tools=True)
    return ChatTemplate(
        source,
        {} if tokenizer is None else tokenizer.named_tokens,
        tool_source=None if tool_source == source else tool_source,
    )


def _is_long(*values: object) -> bool:
    """Whether rendering and tokenizing would hold up the loop; looks at all texts, before they are checked."""
    pending, num_values, num_chars = list(values), 0, 0
    while pending:
        value = pending.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        if num_chars > MAX_CHARS_ON_LOOP or num_values > MAX_VALUES_ON_LOOP:
            return True
    return False
