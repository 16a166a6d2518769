"""Every encoder of text and classifier of transformers, tiny, through the backend: exact, or refused with a reason."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from llmstack_model_files import read_model_config
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models.base import Classifier
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.models.transformers_backend.encoder import TransformersTextEncoder
from llmstack_model_runner.models.transformers_backend.encoder_classes import encoder_part
from llmstack_model_runner.models.transformers_backend.resolve import UnsupportedByTransformersError
from llmstack_model_runner.weights import load_weights
from model_runner_helpers.every_class import random_model, small_config
from model_runner_helpers.every_class import table as table_of

TOLERANCE = 1.1e-5  # of the largest number
LOOSE_TOLERANCE = 2e-5  # the same for the classes that few people serve, whose deep sums round as much
PACKED, BY_LENGTH = "exact, packed", "exact, rows of one length together"
LENGTHS = (5, 21, 1, 40, 21)


def tokens_of(lengths: Sequence[int], vocab_size: int = 97) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def states_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Hidden states of each prompt, all in one step of an `Encoder`."""
    lengths = [len(prompt) for prompt in prompts]
    starts = [0, *accumulate(lengths)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        query_start_loc_list=starts,
        seq_lens_list=lengths,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    token_ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model.forward(token_ids, positions, metadata, [])
    return [hidden[start:end] for start, end in pairwise(starts)]


def load(folder: str | Path, max_model_len: int = 48, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder through the backend, with its weights."""
    config = read_model_config(Path(folder), {})
    arguments = (config, dtype, torch.device("cpu"))
    model = make_model(config["architectures"][0], "transformers", arguments, Sharding())
    model.limit_context(max_model_len)
    load_weights(model, folder)
    return model


def compare(reference: Any, model: Any, lengths: Sequence[int] = LENGTHS, tolerance: float = TOLERANCE) -> str:
    """How the model runs, once its numbers are those of `reference`, alone and in a batch.

    Raises:
        AssertionError: They are not.
    """
    prompts = tokens_of(lengths)
    together, alone = states_of(model, prompts), [states_of(model, [prompt])[0] for prompt in prompts]
    for prompt, *found in zip(prompts, together, alone, strict=True):
        with torch.no_grad():
            encoder = encoder_part(reference)
            expected = encoder(input_ids=torch.tensor([prompt]), return_dict=True).last_hidden_state[0]
            for states in found:
                _expect(states, expected, tolerance)
                if isinstance(model, Classifier):
                    logits = reference(input_ids=torch.tensor([prompt]), return_dict=True).logits[0]
                    _expect(
                        model.compute_label_logits(_labelled(model, states)),
                        logits.reshape(-1, logits.shape[-1]),
                        tolerance,
                    )
    assert isinstance(model, TransformersTextEncoder)
    return PACKED if model.is_packed else BY_LENGTH


def _labelled(model: Any, states: torch.Tensor) -> torch.Tensor:
    if model.labels == "token":
        return states
    return states.mean(0, keepdim=True) if model.is_of_mean else states[:1]


def _expect(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, f"numbers differ by {error:.1e} of the largest"


# The small sizes make no model of these, and no others are known, or a library that they need is missing.
NOT_BUILT = frozenset({
    "CanineForSequenceClassification", "CanineForTokenClassification", "EsmcForMaskedLM",
    "EsmcForSequenceClassification", "EsmcForTokenClassification", "FunnelForMaskedLM", "FunnelForTokenClassification",
    "LayoutLMForMaskedLM", "LayoutLMv2ForSequenceClassification", "LayoutLMv2ForTokenClassification", "LukeForMaskedLM",
    "LukeForSequenceClassification", "LukeForTokenClassification", "MobileBertForMaskedLM", "ModernVBertForMaskedLM",
    "ModernVBertForSequenceClassification", "ModernVBertForTokenClassification", "NeoMMEForMaskedLM",
    "PerceiverForMaskedLM", "PerceiverForSequenceClassification", "Qwen3ASRForTokenClassification",
    "ReformerForMaskedLM", "ReformerForSequenceClassification", "ReformerModel", "RoCBertForMaskedLM",
    "RoCBertForSequenceClassification", "RoCBertForTokenClassification", "RoCBertModel", "SqueezeBertForMaskedLM",
    "SqueezeBertForSequenceClassification", "SqueezeBertForTokenClassification", "SqueezeBertModel",
    "T5Gemma2ForSequenceClassification", "T5Gemma2ForTokenClassification", "T5GemmaEncoderModel",
    "T5GemmaForSequenceClassification", "T5GemmaForTokenClassification", "UltraVBertForMaskedLM",
    "UltraVBertForSequenceClassification", "UltraVBertForTokenClassification",
})  # fmt: skip
# Further classes that people serve, of tables with all kinds of models.
_OTHERS = ("EuroBertModel", "Gemma3TextModel", "GteModel", "JinaEmbeddingsV3Model", "MPNetModel", "ModernBertModel",
           "NomicBertModel")  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {"Gemma3TextModel": {"use_bidirectional_attention": True}}


def architectures() -> list[str]:
    """Encoders, masked language models, and classifiers of types without a causal class, each once."""
    tables = (MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    types = {model_type for table in tables for model_type in table}
    values = [value for table in tables for value in table.values()]
    for table in (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES):
        own = {*table} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | types
        values += [table[model_type] for model_type in table if model_type in own]
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value)} | {*_OTHERS}
    names -= {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}  # which generate: test_encoder_decoders.py
    return sorted(name for name in names - NOT_BUILT if hasattr(transformers, name))


def verdict(architecture: str, changes: dict[str, Any] | None = None, tolerance: float = LOOSE_TOLERANCE) -> str:
    """How it runs exactly, or the reason of the refusal.

    Raises:
        AssertionError: Numbers differ from those of transformers.
    """
    model_class = getattr(transformers, architecture)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        config = small_config(
            model_class.config_class,
            {"num_labels": 3} | (CHANGES.get(architecture, {}) if changes is None else changes),
        )
        try:
            random_model(model_class, config).save_pretrained(folder)
            model = load(folder)
            # What transformers itself reads from the files: of some classes that is not what was saved.
            reference = model_class.from_pretrained(folder, attn_implementation="eager").eval()
            return compare(reference, model, tolerance=tolerance)
        except UnsupportedByTransformersError as error:
            return str(error).partition(": ")[2].removesuffix(".").replace("|", "/")


def table(verdicts: dict[str, str]) -> str:
    """Rows of classes with the same result, the exact ones first."""
    return table_of(verdicts, NOT_BUILT)
