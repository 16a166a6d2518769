"""`AsyncLLM`, the engine front end for servers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING

from llmstack_llm import request_errors
from llmstack_llm.adapters import AdapterRegistry
from llmstack_llm.admission.limits import check_fan_out
from llmstack_llm.admission.rules import check_token_ids
from llmstack_llm.admission.sampling import NO_NAMES, NO_SAMPLING, CheckedSampling, GivenSampling
from llmstack_llm.admission.structured_outputs import StructuredOutputsConfig, read_structured_outputs_config
from llmstack_llm.chat.renderers import ChatFacts, ChatRenderers, chat_facts, load_chat_template
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.engine_args import EngineArgs, UsageContext
from llmstack_llm.engine_clients import make_engine_client, note_engine_death, note_engine_end, trace_observers
from llmstack_llm.engine_front_end import EngineFrontEnd
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.parts import has_media
from llmstack_llm.media.processor import MediaStats
from llmstack_llm.media_door import decode_media
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.model.preflight import check_model_runs
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest, notify
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.stats import StatLogger
from llmstack_llm.outputs.stream import GenerationStream
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import PoolingRequestOutput
from llmstack_llm.registration import register, register_pooling
from llmstack_llm.reloading import reload_engine, reloadable_client
from llmstack_llm.requests import Adapter, ChatPrompt, GenerationRequest, PromptInput, RenderedPrompt
from llmstack_llm.shared_reloading import SharedReload
from llmstack_llm.speech.served import Speech
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_types import EngineReady, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import RelayedMembers
    from llmstack_llm.protocols import AsyncEngineCoreClient


class AsyncLLM(EngineFrontEnd):
    """One model behind one or several engine cores, for many callers on one event loop.

    May be constructed outside of a loop. The loop of the first call is its own; `generate`, `encode` and `shutdown`
    raise RuntimeError in others.

    Attributes:
        tokenizer: None where token ids go in and out.
        chat_template: The template that renders conversations; `is_fallback` where the model has no template.
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
        observers: Sequence[RequestObserver] = (),
        structured_outputs: StructuredOutputsConfig | None = None,
        adapters: AdapterRegistry | None = None,
        media: MediaOptions | None = None,
    ) -> None:
        constraints = structured_outputs or StructuredOutputsConfig()
        super().__init__(
            model_config,
            client,
            InputProcessor(model_config, tokenizer, structured_outputs=constraints, media=media),
            OutputProcessor(tokenizer, observers),
            stat_loggers,
            max_num_queued_reqs,
            max_num_queued_tokens,
            adapters,
        )
        self.output_processor.reads_late = True  # what reads them lets other requests run meanwhile
        self.tokenizer = tokenizer
        self.chat_template = load_chat_template(model_config, tokenizer, chat_template)
        self._renderers: ChatRenderers | None = None
        if tokenizer is not None:
            self._renderers = ChatRenderers(
                self.chat_template, tokenizer,
                content_format=chat_template_content_format, check_length=self.input_processor.check_length,
            )  # fmt: skip

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        multiprocess: bool = True,
        client_addresses: Sequence[str] = (),
        client_index: int = 0,
        members: RelayedMembers | None = None,
    ) -> AsyncLLM:
        """Starts the engine cores, or attaches to running ones, and returns without waiting for them.

        `multiprocess`: Whether the engine core gets a process of its own, or a thread of this one.
        `client_addresses`: Addresses of running engine cores, which continue after this front end has ended.
        `client_index`: Which of several front ends of one server this is.
        `members`: Other machines with engine cores, of which another process of this machine is notified.

        Raises:
            EngineArgsError, ModelConfigError, ModelFilesError, TokenizerError: The options or the folder are unusable.
            EngineStartError: A process cannot be started, or an address is unusable.
        """
        model_config, engine_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if not client_addresses and members is None:
            check_model_runs(engine_config)
        began_s = time.monotonic()
        tokenizer = None if model_config.tokenizer_path is None else load_tokenizer(model_config.tokenizer_path)
        load_tokenizer_s = time.monotonic() - began_s
        # A broken one is refused before a process exists.
        chat_template = load_chat_template(model_config, tokenizer, args.prompt_template)
        client = make_engine_client(
            engine_config, multiprocess, client_addresses, client_index, args.routing,
            can_reload=args.can_reload, members=members,
        )  # fmt: skip
        engine = cls(
            model_config,
            client,
            tokenizer,
            stat_loggers=stat_loggers,
            chat_template=chat_template,
            chat_template_content_format=args.chat_template_content_format,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            observers=trace_observers(args.trace),
            structured_outputs=read_structured_outputs_config(args.structured_outputs_config),
            adapters=args.adapter_registry(),
            media=args.media_options(model_config),
        )
        engine.load_tokenizer_s = load_tokenizer_s
        return engine

    async def reload(
        self, args: EngineArgs | None = None, adapters: Sequence[tuple[str, str]] | None = None, *, moves: bool = False
    ) -> tuple[EngineReady, int]:
        """Lets another engine core take new requests; see `reload_engine`.

        Raises:
            ReloadError: Nothing has changed; the text says why.
        """
        return await reload_engine(self, reloadable_client(self._client), args, adapters, moves=moves)

    def note_engine_end(self, engine_index: int, reason: str) -> None:
        """One of several engine cores has ended, and the process that watches it starts no other one."""
        note_engine_end(self._client, engine_index, reason)

    def note_engine_death(self, pid: int, how: str, *, is_outside: bool) -> None:
        """The process of an engine core has ended: by itself, or by a signal from outside that blames no request."""
        note_engine_death(self._client, pid, how, is_outside=is_outside)

    def shared_reload(self) -> SharedReload:
        """The steps of a reload that several front ends do together.

        Raises:
            ReloadError: The engine was not started with `can_reload`.
        """
        return SharedReload(self, reloadable_client(self._client))

    @property
    def num_finishing_requests(self) -> int:
        """Requests that finish in the engine core before this one, after a reload."""
        return self._client.num_finishing

    @property
    def is_exchanging(self) -> bool:
        """Whether new requests wait for the next engine core, which a reload starts in the place of this one."""
        return self._client.is_exchanging

    def check_sampling(
        self, given: Mapping[str, object], names: Mapping[str, str] = NO_NAMES, *, is_echo: bool = False
    ) -> CheckedSampling:
        """Checks the sampling fields of a request, over the model's defaults, without rendering or submitting it.

        Only for what comes between this check and those of `render`, such as the choice among tools.

        `given`: Field of `SamplingParams` to its value, of whatever type the request has.
        `names`: The request's names of fields where they differ, for errors.
        `is_echo`: Allows `max_tokens` 0.

        Raises:
            InvalidRequestError: Names the first field at fault.
        """
        return self.input_processor.check_sampling(GivenSampling(given, names, is_echo))

    @property
    def chat_facts(self) -> ChatFacts | None:
        """Facts for a page with chats; None for a model that does not complete text, or has no tokenizer."""
        if self._renderers is None:
            return None
        return chat_facts(self._renderers, self.model_config, self.limits, self.input_processor.media.processor)

    @property
    def media_stats(self) -> MediaStats | None:
        """Counts of the pictures of requests; None for a model without."""
        processor = self.input_processor.media.processor
        return None if processor is None else processor.stats

    @property
    def speech(self) -> Speech | None:
        """Windows and prompts of a model that transcribes; None for every other, and before it is ready."""
        return self.input_processor.media.speech

    async def render(self, chat: ChatPrompt, sampling: GivenSampling | CheckedSampling = NO_SAMPLING) -> RenderedPrompt:
        """Checks the sampling fields, then renders and tokenizes a conversation; long ones in a thread.

        Raises:
            InvalidRequestError: Names the first sampling field at fault, or the message and its field.
            ServerOverloadedError: Too many long texts are waiting.
        """
        checked = self.input_processor.check_sampling(sampling)
        if self._renderers is None:
            raise request_errors.unsupported_value("messages", "this server has no tokenizer")
        if checked.values.get("truncate_prompt_tokens") is not None:
            chat = dataclasses.replace(chat, is_cut=True)
        if self.ready is None and has_media(chat.messages):
            await self.wait_until_ready()  # the engine core knows what the model takes
        prompt = await self.input_processor.media.render(self._renderers, chat, self.input_processor.gate)
        return dataclasses.replace(prompt, sampling=checked)

    async def tokenize(self, text: str, *, param: str = "prompt", **options: bool) -> list[int]:
        """The tokens of a text; `options` are those of `Tokenizer.encode`.

        Raises:
            InvalidRequestError: The text is too long, or there is no tokenizer.
            ServerOverloadedError: Too many long texts are waiting.
        """
        return await self.input_processor.tokenize(text, param, **options)

    async def detokenize(self, token_ids: Sequence[int], *, param: str = "tokens") -> str:
        """The text of token ids, special tokens included; raises as `tokenize`."""
        tokenizer = await self.get_tokenizer(param)
        check_token_ids(param, token_ids, self.limits.vocab_size)
        return await self.input_processor.gate.run(len(token_ids), tokenizer.decode, token_ids)

    async def submit(self, *requests: GenerationRequest) -> GenerationStream:
        """Submits prompts, all of them or none, and returns the stream of their outputs.

        Their sampling fields are one object, which is checked before any of them is tokenized.

        Raises:
            InvalidRequestError: A request cannot be served, or its id is in use.
            ServerOverloadedError: Too many completions are in flight.
            EngineStartError, EngineDeadError: The engine core is not there.
        """
        if self.ready is None:
            await self.wait_until_ready()
        if any(request.sampling is not requests[0].sampling for request in requests):
            raise ValueError("requests that are submitted together share their sampling fields")
        sampling = self.input_processor.check_sampling(requests[0].sampling)
        num_completions = len(requests) * (num_generated := sampling.num_generated)
        if num_completions > 1:
            check_fan_out(len(requests), num_generated, self.input_processor.limits)
            sampling.check_repeated_ids(num_completions)
        admitted = [await self.input_processor.admit_async(request, sampling) for request in requests]
        if num_completions > 1:
            sampling.check_repeated_ids(num_completions, admitted[0].sampling_params.bad_words_token_ids)
        if requests[0].adapter is not None or self.adapters.media_kinds:  # all of them have the same
            admitted = [self.adapters.adapted(one, requests[0].adapter) for one in admitted]
        num_prompt_tokens = sum([one.num_prompt_tokens for one in admitted])
        if sampling.values.get("prompt_logprobs") is not None:
            sampling.check_prompt_logprobs(num_prompt_tokens)
        self.check_room(num_completions, num_prompt_tokens, tenant := requests[0].tenant)
        on_first = requests[0].on_admitted and requests[0].on_admitted(admitted, num_generated)
        if any(one.placed for one in admitted):
            admitted = await decode_media(admitted, lambda: self.check_room(num_completions, num_prompt_tokens, tenant))
        # Registered first: an output can never arrive for a request that is not known here.
        collector, engine_requests = register(self.input_processor, self.output_processor, requests, admitted)
        if on_first is not None:
            self.output_processor.request_id_to_state[requests[0].request_id].on_first_token = on_first
        request_ids = [request.request_id for request in requests]
        await self._send(request_ids, engine_requests)
        return GenerationStream(admitted, request_ids, collector, self._abort_silently)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams one request's outputs; leaving or cancelling the iteration aborts the request.

        `sampling_params`: None takes the model's defaults.

        Raises:
            RequestFailedError: This request failed inside the engine.
            InvalidRequestError, ServerOverloadedError, EngineDeadError: As by `submit`.
        """
        await self.wait_until_ready()
        processor = self.input_processor
        sampling = GivenSampling({}) if sampling_params is None else processor.check_params(sampling_params)
        request = GenerationRequest(
            request_id, prompt, sampling, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        async with await self.submit(request) as stream:
            async for output in stream:
                yield output

    async def admit_pooling(
        self, prompt: PromptInput, pooling_params: PoolingParams, *, adapter: Adapter | None = None, **options: object
    ) -> AdmittedPooling:
        """`admit` for a prompt to pool; further options are those of `InputProcessor.admit_pooling`.

        Waits until the engine core is ready: only it knows what vectors the model has.

        Raises:
            InvalidRequestError: Names the field at fault.
            EngineStartError, EngineDeadError: The engine core is not there.
        """
        await self.wait_until_ready()
        admitted = await self.input_processor.admit_pooling_async(prompt, pooling_params, **options)
        return dataclasses.replace(admitted, adapter=adapter)

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
        """Pools one prompt: a stream of one output. Leaving the iteration before aborts the request.

        `pooling_params`: None pools as the model was trained for; not looked at where `prompt` is admitted already.
        `has_room`: The caller has passed `check_room`, for this prompt and others.

        Raises:
            InvalidRequestError, ServerOverloadedError, EngineDeadError, RequestFailedError: As `generate`.
        """
        await self.wait_until_ready()
        if not isinstance(prompt, AdmittedPooling):
            prompt = await self.admit_pooling(prompt, pooling_params or PoolingParams())
        self._check_alive()
        num_tokens = len(prompt.prompt_token_ids)
        if not has_room:
            self.check_room(1, num_tokens, tenant)
        if prompt.placed:
            again = None if has_room else lambda: self.check_room(1, num_tokens, tenant)
            (prompt,) = await decode_media([prompt], again)
        fields = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant}
        collector, request = register_pooling(self.input_processor, self.output_processor, request_id, prompt, **fields)
        observers = self.output_processor.observers
        submitted = SubmittedRequest(
            request_id, prompt.prompt, prompt.prompt_token_ids, prompt.pooling_params,
            tenant=tenant, cache_salt=cache_salt, lora_name=request.lora_name or "",
        )  # fmt: skip
        notify(observers, RequestObserver.on_submitted, submitted)
        output, error = None, None
        try:
            await self._send([request_id], [request])
            output = await collector.get()
            notify(observers, RequestObserver.on_pooled, request_id)
        except Exception as raised:  # reported to observers, and raised again
            error = raised
            raise
        finally:
            notify(observers, RequestObserver.on_finished, request_id, error)
            if output is None:
                self._abort_silently([request_id])
        yield output

    async def get_tokenizer(self, param: str = "prompt") -> Tokenizer:
        """The tokenizer; raises InvalidRequestError, which names `param`, where there is none."""
        if self.tokenizer is None:
            raise request_errors.unsupported_value(param, "this server has no tokenizer")
        return self.tokenizer

    @property
    def prompt_prefixes(self) -> Mapping[str, str]:
        """Prefixes of texts to embed, by their use (query, document), if the model's folder has them."""
        return self.model_config.pooling.prompts

    @property
    def label_names(self) -> Mapping[int, str]:
        """The names of a classifier's labels, if it has names."""
        return self.model_config.label_names
