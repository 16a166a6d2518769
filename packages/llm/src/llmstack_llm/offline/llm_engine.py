"""`LLMEngine`, the engine front end for synchronous code."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmstack_llm import request_errors
from llmstack_llm.adapters import AdapterRegistry, LoRARequest
from llmstack_llm.admission.seeds import completion_seed
from llmstack_llm.admission.structured_outputs import StructuredOutputsConfig, read_structured_outputs_config
from llmstack_llm.chat.renderers import load_chat_template
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.engine_args import EngineArgs, EngineArgsError, UsageContext
from llmstack_llm.engine_clients import trace_observers
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media_door import release_media
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.model.preflight import check_model_runs
from llmstack_llm.offline.media import OfflineMedia
from llmstack_llm.offline.tokenizer import OfflineTokenizer, Render
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import CompletionOutput, RequestOutput
from llmstack_llm.outputs.stats import StatLogger, announce_engine, record_all
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from llmstack_llm.registration import register_pooling
from llmstack_llm.requests import Adapter, AdmittedRequest, PromptInput, RenderedPrompt
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_types import (
    Control,
    EngineCoreRequest,
    FinishReason,
    LLMStackError,
    PoolingParams,
    RequestFailedError,
    SamplingParams,
    StepRecording,
)

if TYPE_CHECKING:
    from llmstack_engine_core.protocols import EventHook
    from llmstack_llm.pooling.states import PoolingCollector
    from llmstack_llm.protocols import SyncEngineCoreClient

logger = logging.getLogger(__name__)


class LLMEngine:
    """One model behind one engine core, for one thread.

    Attributes:
        client: The engine core; in this process unless asked otherwise, so that a debugger can step into it.
        input_processor: Tokenizes and admits.
        output_processor: The requests in flight.
        media: Pictures and the like of prompts.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        client: SyncEngineCoreClient,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        chat_template: str | ChatTemplate | None = None,
        stat_loggers: Sequence[StatLogger] = (),
        trace: bool = False,
        structured_outputs: StructuredOutputsConfig | None = None,
        adapters: AdapterRegistry | None = None,
        media: MediaOptions | None = None,
    ) -> None:
        self.model_config = model_config
        self.client = client
        self.tokenizer = tokenizer
        self.renderer: Callable[[], Render | None] = lambda: None  # of the `LLM` that this is the engine of
        numbers = itertools.count(1)
        # Requests without a seed get one from the engine's, so that a script gives the same texts when it runs again.
        self.input_processor = InputProcessor(
            model_config,
            tokenizer,
            draw=lambda: completion_seed(seed, next(numbers)),
            structured_outputs=structured_outputs or StructuredOutputsConfig(),
            media=media,
        )
        self.media = OfflineMedia(self.input_processor.media)
        self.output_processor = OutputProcessor(tokenizer, trace_observers(trace))
        self.chat_template = load_chat_template(model_config, tokenizer, chat_template)
        self.adapters = adapters or AdapterRegistry()
        self._stat_loggers = list(stat_loggers)
        self._request_id_to_collector: dict[str, RequestOutputCollector | PoolingCollector] = {}
        self._ended: list[RequestOutput | PoolingRequestOutput] = []
        self.ready = model_config.use.restrict(client.wait_until_ready())
        self.input_processor.set_ready(self.ready)
        announce_engine(self._stat_loggers, self.ready)

    def get_tokenizer(self) -> OfflineTokenizer:
        """The tokenizer, which renders conversations as long as its `LLM` is there.

        Raises:
            InvalidRequestError: There is none.
        """
        if self.tokenizer is None:
            raise request_errors.unsupported_value("prompt", "there is no tokenizer (skip_tokenizer_init)")
        return OfflineTokenizer(self.tokenizer, self._render)

    def _render(self, *arguments: object, **options: object) -> list[RenderedPrompt]:
        render = self.renderer()
        if render is None:
            raise request_errors.unsupported_value("messages", "conversations are rendered by an LLM, which is gone")
        return render(*arguments, **options)

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        usage_context: UsageContext = UsageContext.LLM_CLASS,
        *,
        multiprocess: bool = False,
        stat_loggers: Sequence[StatLogger] = (),
        event_hooks: Sequence[EventHook] = (),
    ) -> LLMEngine:
        """Builds the engine core in this process, or in one of its own, and waits until it is ready.

        `event_hooks`: Receive states and steps; only in this process.

        Raises:
            EngineArgsError, ModelConfigError, ModelFilesError, TokenizerError, EngineStartError: It cannot be built.
        """
        from llmstack_engine_client import InprocClient, SyncMPClient

        if args.data_parallel_size > 1:
            raise EngineArgsError("data_parallel_size: plain code steps one engine core; AsyncLLM balances several")
        if multiprocess and event_hooks:
            raise EngineArgsError("event_hooks: they run beside the engine core, which multiprocess moves elsewhere")
        model_config, engine_config = args.create_engine_config(usage_context)
        check_model_runs(engine_config)
        tokenizer = None if model_config.tokenizer_path is None else load_tokenizer(model_config.tokenizer_path)
        chat_template = load_chat_template(
            model_config, tokenizer, args.prompt_template
        )  # refused before anything is built
        client: SyncEngineCoreClient = (
            SyncMPClient(engine_config) if multiprocess else InprocClient(engine_config, event_hooks)
        )
        try:
            engine = cls(
                model_config,
                client,
                tokenizer,
                seed=args.seed,
                chat_template=chat_template,
                stat_loggers=stat_loggers,
                trace=args.trace,
                structured_outputs=read_structured_outputs_config(args.structured_outputs_config),
                adapters=args.adapter_registry(),
                media=args.media_options(model_config),
            )
            defaults = [LoRARequest(kind, lora_path=path) for kind, path in (args.default_mm_loras or {}).items()]
            engine.resolve_adapters(defaults, len(defaults))
            return engine
        except LLMStackError:
            client.shutdown()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput | AdmittedRequest,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a request; `step` returns its outputs.

        Raises:
            InvalidRequestError: It cannot be served, or the id is in use.
        """
        if not isinstance(prompt, AdmittedRequest):
            prompt = self.media.read(prompt, self.tokenizer, "prompt")
            prompt = self.input_processor.admit(prompt, self.input_processor.check_params(sampling_params))
        prompt = self.media.decode_one(prompt)
        try:
            self._begin(request_id, prompt, priority)
        except BaseException:
            release_media([prompt])
            raise

    def _begin(self, request_id: str, prompt: AdmittedRequest, priority: int) -> None:
        adapter_fields = {} if prompt.adapter is None else prompt.adapter.fields()
        requests = self.input_processor.process_inputs(request_id, prompt, priority=priority, **adapter_fields)
        collector = self.output_processor.new_collector(prompt.sampling_params.output_kind)
        self.output_processor.add_request(request_id, prompt, requests, collector)
        self._request_id_to_collector[request_id] = collector
        self._send(request_id, requests)

    def add_pooling_request(
        self,
        request_id: str,
        prompt: PromptInput | AdmittedPooling,
        pooling_params: PoolingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a prompt to pool; `step` returns its one output.

        Raises:
            InvalidRequestError: It cannot be served, or the id is in use.
        """
        if not isinstance(prompt, AdmittedPooling):
            prompt = self.media.read(prompt, self.tokenizer, "prompt")
            prompt = self.input_processor.admit_pooling(prompt, pooling_params)
        collector, request = register_pooling(
            self.input_processor, self.output_processor, request_id, self.media.decode_one(prompt), priority=priority
        )
        self._request_id_to_collector[request_id] = collector
        self._send(request_id, [request])

    def _send(self, request_id: str, requests: Sequence[EngineCoreRequest]) -> None:
        try:
            for request in requests:
                self.client.add_request(request)
        except LLMStackError:
            self.client.abort_requests(self.output_processor.abort_requests([request_id], is_silent=True))
            del self._request_id_to_collector[request_id]
            raise

    def resolve_adapters(
        self, lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[Adapter | None]:
        """The adapter of each prompt, loaded and checked.

        Raises:
            InvalidRequestError: There are more or fewer than prompts, or one cannot be served.
        """
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * num_prompts
        kinds = (LoRARequest, type(None))
        if not isinstance(lora_request, list | tuple) or not all(isinstance(one, kinds) for one in lora_request):
            raise request_errors.invalid_type("lora_request", "LoRARequest, or a list of them and None", lora_request)
        if len(lora_request) != num_prompts:
            raise request_errors.invalid_value(
                "lora_request", f"{len(lora_request)} adapters for {num_prompts} prompts"
            )

        def load(identity: str, path: str) -> str:
            return self.client.call(Control.LOAD_ADAPTER, identity, path)

        found = {one: self.adapters.resolve(one, load) for one in dict.fromkeys(lora_request) if one is not None}
        return [None if one is None else found[one] for one in lora_request]

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Runs one step and returns its outputs; does nothing while no request is unfinished.

        A request that fails inside the engine has the finish reason `error`; the others continue.
        """
        ended, self._ended = self._ended, []
        if not self.output_processor.num_unfinished_requests:
            return ended
        outputs = self.client.get_outputs()
        processed = self.output_processor.process_outputs(
            outputs.outputs, outputs.timestamp_s, outputs.events, outputs.phases
        )
        processed.iteration_stats.block_evictions = outputs.evictions
        processed.iteration_stats.shadow = outputs.shadow
        if processed.request_ids_to_abort:
            self.client.abort_requests(processed.request_ids_to_abort)
        record_all(self._stat_loggers, outputs.scheduler_stats, processed.iteration_stats)
        found = (self._take(request_id) for request_id in processed.request_ids)
        return ended + [output for output in found if output is not None]

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do or to return."""
        return bool(self.output_processor.num_unfinished_requests or self._ended)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; the next `step` returns them with finish reason `abort`. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        aborted = self.output_processor.abort_requests(ids)
        if aborted:
            self.client.abort_requests(aborted)
        found = (self._take(request_id) for request_id in ids if request_id in self._request_id_to_collector)
        self._ended += [output for output in found if output is not None]

    def sleep(self, level: int = 1) -> bool:
        """Gives the KV storage back, and with level 2 the weights too; False while requests are running."""
        return self.client.call(Control.SLEEP, level)

    def wake_up(self) -> None:
        """Allocates and loads what `sleep` freed; requests are refused before."""
        self.client.call(Control.WAKE_UP)

    def start_profile(self) -> str:
        """Begins to record what the model runner computes; empty, or a sentence on why not."""
        return self.client.call(Control.START_PROFILE)

    def stop_profile(self) -> list[str]:
        """Ends that; the traces written since the last call."""
        return self.client.call(Control.STOP_PROFILE).splitlines()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self.client.call(Control.RESET_PREFIX_CACHE)

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """The last steps after number `after_step` and the last events, as far as the engine core keeps them."""
        return self.client.call(Control.RECENT_STEPS, after_step)

    def shutdown(self) -> None:
        """Stops the engine core, and what decodes media. Idempotent."""
        self.media.shutdown()
        self.client.shutdown()

    def _take(self, request_id: str) -> RequestOutput | PoolingRequestOutput | None:
        collector = self._request_id_to_collector[request_id]
        output: RequestOutput | PoolingRequestOutput | None
        try:
            output = collector.get_nowait()
        except RequestFailedError as error:
            logger.error("request %s failed: %s", request_id, error)
            is_pooling = not isinstance(collector, RequestOutputCollector)
            output = _failed_pooling(request_id) if is_pooling else _failed(request_id)
        if output is not None and output.finished:
            del self._request_id_to_collector[request_id]
        return output


def _failed_pooling(request_id: str) -> PoolingRequestOutput:
    return PoolingRequestOutput(request_id, None, [], PoolingOutput(array("f")), FinishReason.ERROR.value)


def _failed(request_id: str) -> RequestOutput:
    completion = CompletionOutput(0, finish_reason=FinishReason.ERROR.value)
    return RequestOutput(request_id, None, [], outputs=[completion], finished=True)
