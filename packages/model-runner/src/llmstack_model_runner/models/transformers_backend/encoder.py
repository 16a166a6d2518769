"""Encoders of text of transformers, as models of the runner."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.models.base import Encoder
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec
from llmstack_model_runner.models.transformers_backend.attention import (
    IMPLEMENTATION,
    PROBE_IMPLEMENTATION,
    install,
    register_attention,
)
from llmstack_model_runner.models.transformers_backend.base import TransformersBase, describe_error
from llmstack_model_runner.models.transformers_backend.encoder_classes import (
    encoder_part,
    first_position,
    num_table_positions,
    resolve_encoder,
)
from llmstack_model_runner.models.transformers_backend.encoder_rows import (
    EncoderCode,
    EqualRows,
    PackedRows,
    RowsRun,
)
from llmstack_model_runner.models.transformers_backend.probe import ProbeError
from llmstack_model_runner.models.transformers_backend.resolve import build_on_meta, max_model_len
from llmstack_model_runner.models.transformers_backend.row_attention import RowAttention
from llmstack_model_runner.models.transformers_backend.row_probe import (
    Rows,
    check_first_sees_last,
    check_last_position,
    check_rows,
    check_rows_are_apart,
    find_row_layers,
    trial_rows,
)

logger = logging.getLogger(__name__)

# Beginnings of tensors that other tasks need.
_OF_OTHER_TASKS = (
    "cls.", "lm_head.", "classifier.", "pooler.", "predictions.", "head.", "decoder.", "vocab_", "mask_predictions.",
    "lm_predictions.", "discriminator_predictions.", "generator_", "sop_classifier.", "pre_classifier.",
)  # fmt: skip
_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_MOST_SCORE_BYTES = 1 << 30
_SCORE_COPIES = 6  # of a layer's scores in float32 that are alive at once: with biases of positions, and softmax


class TransformersTextEncoder(TransformersBase, Encoder):
    """Any encoder of text of transformers: rows are packed, or computed with others of their length.

    Attributes:
        labels: What a head of the class labels.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        found = resolve_encoder(config)
        self._config, self._model_class, self.labels = found.config, found.model_class, found.labels
        self._has_own_attention = found.has_own_attention
        self._dtype, self._device = dtype, device
        self._attention_name = None
        self._token_types = int(getattr(found.config, "type_vocab_size", 0) or 0)
        built = build_on_meta(self._config, self._model_class, dtype, None)
        rows = num_table_positions(encoder_part(built))
        declared = max_model_len(self._config)
        self.kv_spec = ModelKVSpec(
            (), vocab_size=int(self._config.vocab_size), max_model_len=declared if rows is None else min(declared, rows)
        )
        self._longest = self.kv_spec.max_model_len
        numbers = (getattr(self._config, name, None) for name in _HEADS)
        self._num_heads = next((number for number in numbers if isinstance(number, int)), 1)

    def is_ignored(self, name: str) -> bool:
        """Whether only other tasks need the tensor."""
        if self.labels:
            return False
        own = name.removeprefix(f"{self._model_class.base_model_prefix}.")
        return own.startswith(_OF_OTHER_TASKS)

    def limit_context(self, max_model_len: int) -> None:
        """Raises for contexts in which rows of a batch would not be independent, or scores take too much memory."""
        super().limit_context(max_model_len)
        self._longest = max_model_len
        if self._has_own_attention:
            with self.trial():
                self._check_scores()

    @torch.inference_mode()
    def finish_loading(self) -> None:
        """Packs the layers, and finds by running it how the model can be run.

        Raises:
            UnsupportedByTransformersError: In no way.
        """
        self._pack_encoder()
        encoder: Any = encoder_part(self._model)
        self._code = EncoderCode(encoder, first_position(encoder), self._token_types)
        with self.trial():
            self._rows: RowsRun = self._find_run(encoder)
            check_first_sees_last(self._rows, trial_rows(self.kv_spec.vocab_size, self._longest, self._device))
            self._check_head()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states that the encoder returns."""
        return self._rows(token_ids, positions, metadata.starts_of_whole_prompts(), token_types)

    @property
    def is_packed(self) -> bool:
        """Whether rows are packed."""
        return isinstance(self._rows, PackedRows)

    def _pack_encoder(self) -> None:
        self._pack(self._model)

    def _check_head(self) -> None:
        """Nothing to check without a head."""

    def _find_run(self, encoder: Any) -> RowsRun:
        self._own_attention = self._model.config._attn_implementation
        if not self._has_own_attention:
            try:
                return self._pack_rows(encoder)
            except Exception as error:  # noqa: BLE001 - model code can raise anything, and there is another way
                reason = str(error) if isinstance(error, ProbeError) else describe_error(error)
                logger.info("%s: rows are not packed, since %s", self._model_class.__name__, reason)
                self._model.set_attn_implementation(self._own_attention)
        return self._batch_rows()

    def _pack_rows(self, encoder: Any) -> RowsRun:
        if not self._code.takes_positions:
            raise ProbeError("it takes no positions")
        register_attention()
        self._model.set_attn_implementation(PROBE_IMPLEMENTATION)
        layers = find_row_layers(encoder, self._run_one, self._dtype, self._longest)
        self._model.set_attn_implementation(self._own_attention)
        rows = trial_rows(self.kv_spec.vocab_size, self._longest, self._device, layers)
        expected = self._alone(rows)
        self._model.set_attn_implementation(IMPLEMENTATION)
        attention = RowAttention(layers)
        install(encoder, attention)
        packed = PackedRows(self._code, attention, self.kv_spec.max_model_len)
        check_rows_are_apart(encoder.get_input_embeddings(), packed, rows)
        check_rows(packed, expected, rows)
        check_last_position(packed, self.kv_spec.vocab_size, self._longest, self._device)
        return packed

    def _batch_rows(self) -> RowsRun:
        self._check_scores()
        together = EqualRows(self._code, self._num_heads)
        rows = trial_rows(self.kv_spec.vocab_size, self._longest, self._device)
        check_rows(together, self._alone(rows), rows)
        check_last_position(together, self.kv_spec.vocab_size, self._longest, self._device)
        return together

    def _check_scores(self) -> None:
        """Raises where the scores of all pairs of tokens of the longest prompt take too much memory."""
        pair_bytes = self._num_heads * 4 * _SCORE_COPIES
        if pair_bytes * self._longest * self._longest > _MOST_SCORE_BYTES:
            most = int((_MOST_SCORE_BYTES / pair_bytes) ** 0.5)
            raise ProbeError(
                f"its attention keeps the scores of all pairs of tokens, so max_model_len must not exceed {most}"
            )

    def _alone(self, rows: Rows) -> dict[int, torch.Tensor]:
        """The states that transformers computes for each row by itself, by the row's start."""
        return {start: self._code(rows.token_ids[None, start:end])[0] for start, end in pairwise(rows.starts)}

    def _run_one(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._code(token_ids[None], positions[None])[0]
