"""Registration of prompts in a front end, before an engine core gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.media_door import release_media
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.states import PoolingCollector
from llmstack_llm.requests import AdmittedRequest, GenerationRequest
from llmstack_types import EngineCoreRequest, InvalidRequestError


def register(
    input_processor: InputProcessor,
    output_processor: OutputProcessor,
    requests: Sequence[GenerationRequest],
    admitted: Sequence[AdmittedRequest],
) -> tuple[RequestOutputCollector, list[EngineCoreRequest]]:
    """Registers prompts that were submitted together; returns their collector and their engine requests."""
    collector = output_processor.new_collector(admitted[0].sampling_params.output_kind, is_split=requests[0].is_split)
    engine_requests: list[EngineCoreRequest] = []
    for index, (request, one) in enumerate(zip(requests, admitted, strict=True)):
        adapter_fields = {} if one.adapter is None else one.adapter.fields()
        try:
            completions = input_processor.process_inputs(
                request.request_id,
                one,
                priority=request.priority,
                cache_salt=request.cache_salt,
                tenant=request.tenant,
                deadline_s=request.deadline_s,
                kv_transfer=request.kv_transfer,
                session=request.session,
                is_session_final=request.is_session_final,
                **adapter_fields,
            )
            output_processor.add_request(request.request_id, one, completions, collector, index)
        except InvalidRequestError:
            output_processor.abort_requests([one.request_id for one in requests[:index]], is_silent=True)
            release_media(admitted)
            raise
        engine_requests += completions
    return collector, engine_requests


def register_pooling(
    input_processor: InputProcessor,
    output_processor: OutputProcessor,
    request_id: str,
    admitted: AdmittedPooling,
    **fields: Any,
) -> tuple[PoolingCollector, EngineCoreRequest]:
    """Registers a prompt to pool; `fields` are those of `InputProcessor.process_pooling`."""
    try:
        request = input_processor.process_pooling(request_id, admitted, **fields)
        return output_processor.add_pooling_request(admitted.prompt, request, admitted.release), request
    except InvalidRequestError:
        release_media([admitted])
        raise
