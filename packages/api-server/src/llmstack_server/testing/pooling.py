"""Pooling of the fake engine front end."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm import RenderedPrompt
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import check_truncation, check_truncation_side
from llmstack_llm.model.pooling_config import PoolingConfig
from llmstack_llm.pooling.admission import AdmittedPooling, admit_pooling
from llmstack_llm.pooling.outputs import PoolingOutput
from llmstack_llm.pooling.prompt import LimitedText, TextPair, cut_token_ids
from llmstack_types import PoolingParams, PoolingTask


def admit_bytes(
    prompt: Any, params: PoolingParams, limits: AdmissionLimits, param: str, param_names: Mapping[str, str] | None
) -> AdmittedPooling:
    """Admits a prompt, one byte per token, with the real checks; a pair of texts is joined by `|`."""
    text = _cut(prompt) if isinstance(prompt, str) else None
    if isinstance(prompt, TextPair):
        prompt = list(f"{_cut(prompt.first)}|{_cut(prompt.second)}".encode())
    elif isinstance(prompt, RenderedPrompt):
        text, prompt = prompt.text, prompt.token_ids
    token_ids = list(text.encode()) if text is not None else prompt
    check_truncation_side("truncation_side", params.truncation_side)
    max_tokens = check_truncation("truncate_prompt_tokens", params.truncate_prompt_tokens, limits.max_request_tokens)
    token_ids = cut_token_ids(token_ids, max_tokens, params.truncation_side)
    config, names = PoolingConfig(), param_names or {}
    return admit_pooling(text, token_ids, params, limits, config, param=param, param_names=names)


def _cut(text: str) -> str:
    return str(text)[: text.max_tokens] if isinstance(text, LimitedText) else text


def pool_bytes(admitted: AdmittedPooling, num_labels: int) -> PoolingOutput:
    """The prompt's length, first, greatest and last byte, as far as `dimensions` or labels go; or so of each byte."""
    token_ids, params = admitted.prompt_token_ids, admitted.pooling_params
    task = params.task or PoolingTask.EMBED
    size = num_labels if task.gives_labels else params.dimensions
    if task.is_per_token:
        vectors = [_vector([token_id])[:size] for token_id in token_ids]
        return PoolingOutput(array("f", itertools.chain.from_iterable(vectors)), len(vectors))
    return PoolingOutput(array("f", _vector(token_ids)[:size]))


def _vector(token_ids: Sequence[int]) -> tuple[float, ...]:
    return (len(token_ids), token_ids[0], max(token_ids), token_ids[-1])
