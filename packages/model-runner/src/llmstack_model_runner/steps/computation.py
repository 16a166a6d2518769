"""Computation of a step: hidden states, logits, and sampling on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from llmstack_kernels.float8_cache import STORED_TYPE
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models import CausalLM, Encoder, Model
from llmstack_model_runner.models.heads import Heads
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.numeric_contract import HOLDS, describe_numeric_contract
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.sampling import GreedyChoice, Sampler, SamplerOutput, TokenBitmask
from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows
from llmstack_model_runner.steps.pooling import PooledRows, pool
from llmstack_model_runner.steps.prepare_inputs import ModelInputs
from llmstack_model_runner.steps.prompt_logprobs import PromptLogprobs, compute_prompt_logprobs
from llmstack_types import TokenMasks

MakeTokenMasks = Callable[[], TokenMasks]
FindVectors = Callable[[StepRows], StepVectors | None]
"""The vectors that stand in place of tokens of a step; None where there are none."""
SelectRows = Callable[[torch.Tensor], None]
"""Receives the tokens of a step whose logits are computed next."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of a step's forward pass."""

    logits: torch.Tensor | None  # [num_logits, vocab_size] float32; None if no row samples
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Sequence[PooledRows] = ()


def compute(
    model: Model,
    batch: InputBatch,
    step: StepRows,
    inputs: ModelInputs,
    kv_caches: KVCaches,
    heads: Heads,
    select_rows: SelectRows | None = None,
) -> Computed:
    """Runs the model, and all computations that need its hidden states.

    Where these are logits alone, the last layer computes the tokens that need them, besides all keys and values.
    """
    if select_rows is None and _needs_few_tokens(model, batch, inputs) and _is_batch_invariant(model, kv_caches):
        return Computed(_logits_of(model, _forward(model, _omit_tokens(step, inputs), kv_caches), None, None))
    hidden = _forward(model, inputs, kv_caches)
    if batch.on_hidden is not None:
        batch.on_hidden(step, hidden)
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    compute_logits = partial(_logits_of, model, hidden, select_rows)
    if batch.num_prompt_logprobs and isinstance(model, CausalLM):
        prompt_logprobs = list(compute_prompt_logprobs(batch, step, inputs, compute_logits))
    align = partial(model.align, inputs.attention_metadata)
    pooled = pool(batch, step, inputs, hidden, heads, align) if batch.pooling.row_to_params else ()
    logits = compute_logits(inputs.logits_indices) if len(inputs.logits_indices) else None
    return Computed(logits, prompt_logprobs, pooled)


def compute_stage(model: Model, inputs: ModelInputs, kv_caches: KVCaches) -> Computed:
    """Runs a stage that is not the last one, which sends its hidden states to the next one."""
    _forward(model, inputs, kv_caches)
    return Computed(None)


def sample_on_host(
    sampler: Sampler,
    batch: InputBatch,
    step: StepRows,
    sampling_indices: IntArray,
    logits: torch.Tensor,
    bitmask: TokenBitmask | None,
    greedy: GreedyChoice | None = None,
) -> SamplerOutput:
    """Samples a token for each row of the logits, with parameters and tokens on the host.

    `sampling_indices` are the rows of the step that the logits belong to; `greedy` is their argmax, if it is known.
    """
    rows = step.rows[sampling_indices]
    num_places = step.num_drafts[sampling_indices] + 1
    output_indices = ragged_aranges(batch.num_tokens[rows] - batch.num_prompt_tokens[rows], num_places)
    metadata = batch.sampling.metadata(np.repeat(rows, num_places), output_indices, bitmask)
    return sampler.sample(logits, metadata, greedy)


def make_bitmask(step: StepRows, sampling_indices: IntArray, token_masks: MakeTokenMasks) -> TokenBitmask | None:
    """Fetches the masks of a step whose forward pass is launched; None if no row that samples is constrained."""
    masks = token_masks()
    if not masks.request_ids:
        return None
    request_ids = [step.request_ids[index] for index in sampling_indices.tolist()]
    return TokenBitmask.of(masks, request_ids, step.num_drafts[sampling_indices] + 1)


def _forward(model: Model, inputs: ModelInputs, kv_caches: KVCaches) -> torch.Tensor:
    """Hidden states of all tokens: [num_tokens, hidden_size]."""
    arguments = (inputs.token_ids, inputs.positions, inputs.attention_metadata, kv_caches)
    return model.forward(*arguments, inputs.token_types) if isinstance(model, Encoder) else model.forward(*arguments)


def _needs_few_tokens(model: Model, batch: InputBatch, inputs: ModelInputs) -> bool:
    """Whether the output of the last layer is used for some tokens only, which the model can select."""
    is_possible = isinstance(model, CausalLM) and model.can_omit_tokens and inputs.token_ids.device.type == "cpu"
    has_other_use = batch.num_prompt_logprobs or batch.pooling.row_to_params or batch.on_hidden is not None
    return is_possible and not has_other_use and 0 < len(inputs.logits_indices) < len(inputs.token_ids)


def _is_batch_invariant(model: Model, kv_caches: KVCaches) -> bool:
    """Whether a token has equal bits beside any other tokens.

    Elsewhere tokens are not omitted: PyTorch's attention has other bits for one token than for several of a row, and
    whether tokens are omitted depends on the other requests of the step.
    """
    dtype = kv_caches[0][0].dtype  # the model's, or of 8 bits
    return dtype != STORED_TYPE and describe_numeric_contract(model, dtype, torch.device("cpu")) == HOLDS


def _omit_tokens(step: StepRows, inputs: ModelInputs) -> ModelInputs:
    """The inputs with the last layer's layout: of each row that samples, the tokens that have logits."""
    rows = inputs.sampling_indices
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(step.num_drafts[rows] + 1, out=query_start_loc[1:])
    metadata = inputs.attention_metadata.with_last_layer(
        inputs.logits_indices, torch.from_numpy(rows), torch.from_numpy(query_start_loc)
    )
    return replace(inputs, attention_metadata=metadata)


def _logits_of(
    model: Model, hidden: torch.Tensor, select_rows: SelectRows | None, tokens: torch.Tensor | None
) -> torch.Tensor:
    """Logits of these tokens; of all hidden states if None."""
    if not isinstance(model, CausalLM):
        raise InputBatchError("a row is to sample, but the model has no output head")
    if tokens is None:
        return model.compute_logits(hidden)
    if select_rows is not None:
        select_rows(tokens)
    return model.compute_logits(hidden[tokens])
