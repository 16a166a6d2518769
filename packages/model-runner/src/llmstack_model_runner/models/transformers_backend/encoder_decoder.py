"""Encoders with decoders of transformers, such as T5, BART and NLLB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from llmstack_model_runner.layers.adaptation import adapted_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.cross_attention import CrossKVSpec
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec, keys_and_values
from llmstack_model_runner.models.transformers_backend.attention import IMPLEMENTATION, install, register_attention
from llmstack_model_runner.models.transformers_backend.base import TransformersBase
from llmstack_model_runner.models.transformers_backend.cross_calls import (
    CrossAttended,
    GivenPositions,
    attend_to_all,
    find_calls,
    row_metadata,
)
from llmstack_model_runner.models.transformers_backend.head import StandIn
from llmstack_model_runner.models.transformers_backend.probe import ROUNDING, ProbeError
from llmstack_model_runner.models.transformers_backend.resolve import resolve_encoder_decoder
from llmstack_model_runner.models.transformers_backend.source_encoder import SourceEncoder

_DEFAULT_NUM_POSITIONS = 512  # T5's, whose configurations may not say it
_TRIAL_SOURCE, _TRIAL_TOKENS, _TRIAL_CUT = 5, 7, 4
_TRIAL_ROUNDING = 4  # as often as a trial's products follow each other more than in other probes


class TransformersEncoderDecoder(TransformersBase, CausalLM):
    """Any encoder with a decoder of transformers whose attention can be replaced.

    The prompt of a user goes to the encoder, as an item. The decoder begins with a token or two of the configuration.
    """

    cross_kv: CrossKVSpec

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._model_class = resolve_encoder_decoder(config)
        if adapted_layers() is not None:
            raise self._unsupported("adapters are not supported beside an encoder")
        self._dtype, self._device = dtype, device
        self._attention_name = None
        found = self._config
        num_layers = _first(found, "num_decoder_layers", "decoder_layers", "num_hidden_layers")
        num_heads = _first(found, "decoder_attention_heads", "num_heads", "num_attention_heads")
        self._size = _first(found, "d_model", "hidden_size")
        head_dim = getattr(found, "d_kv", None) or self._size // num_heads
        num_positions = getattr(found, "n_positions", None) or getattr(found, "max_position_embeddings", None)
        self._num_positions = int(num_positions or _DEFAULT_NUM_POSITIONS)
        self.kv_spec = ModelKVSpec(
            (keys_and_values(num_heads, head_dim),) * num_layers,
            vocab_size=int(found.vocab_size),
            max_model_len=self._num_positions,
        )
        self.cross_kv = CrossKVSpec(
            num_layers, num_heads, head_dim, self._num_positions, vector_size=2 * num_layers * num_heads * head_dim
        )
        num_own_heads = _first(found, "encoder_attention_heads", "num_heads", "num_attention_heads")
        self._encoder = SourceEncoder((self._num_positions, self._size, num_own_heads), dtype, device)

    def media_encoder(self) -> SourceEncoder:
        return self._encoder

    @property
    def item_size(self) -> int:
        """Width of the encoder's states. No vector stands in place of a token."""
        return self._size

    @torch.inference_mode()
    def finish_loading(self) -> None:
        """Packs the layers, finds the calls of attention, and compares a trial with the model's own code.

        Raises:
            UnsupportedByTransformersError: The results differ, or paged attention does not support the model.
        """
        self._pack(self._model)
        register_attention()
        model: Any = self._model
        with self.trial():
            self._encoder.take(model.get_encoder())
            self._decoder: Any = model.get_decoder()
            self._nothing = torch.zeros(1, 1, self._size, dtype=self._dtype, device=self._device)
            expected = self._own_trial()
            self._replace_attention()
            self._check_trial(*expected)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states that the decoder returns."""
        if metadata.cross is None:
            raise ValueError("a step of a model with cross attention has no rows of it")
        self._attention.begin(metadata, kv_caches)
        return self._run(token_ids, positions, self._nothing)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows, by the model's own code behind its decoder."""
        self._stand_in.output = self._output_class(last_hidden_state=hidden[None])
        token_ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        model: Any = self._model
        found: torch.Tensor = model(
            encoder_outputs=(self._nothing,), decoder_input_ids=token_ids, use_cache=False, return_dict=True
        ).logits
        self._stand_in.output = None
        return found[0].float()

    @torch.inference_mode()
    def cross_keys_and_values(self, encoded: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of an item in each layer: each [num_heads, num_vectors, head_dim]."""
        place = torch.zeros(1, dtype=torch.int64, device=encoded.device)
        self._attention.keep()
        self._run(place, place, encoded[None])
        return self._attention.kept

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        self._positions.begin(token_ids, positions)
        output = self._decoder(
            input_ids=token_ids[None], encoder_hidden_states=encoded, use_cache=False, return_dict=True
        )
        self._output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _own_trial(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of some tokens, and logits, by the model's code alone."""
        source, tokens = (self._trial(count) for count in (_TRIAL_SOURCE, _TRIAL_TOKENS))
        self._model.set_attn_implementation("eager")
        model: Any = self._model
        output = model(input_ids=source[None], decoder_input_ids=tokens[None], use_cache=False, return_dict=True)
        encoded: torch.Tensor = output.encoder_last_hidden_state[0]
        return encoded, output.logits[0].float()

    def _replace_attention(self) -> None:
        self._model.set_attn_implementation(IMPLEMENTATION)
        install(self._model, attend_to_all)
        self._positions = GivenPositions(self._decoder, self._num_positions, self._device)
        layers = find_calls(self._decoder, self._run, self._size, self._num_positions)
        self._attention = CrossAttended(layers, self._dtype, self._device)
        install(self._decoder, self._attention)
        self._stand_in = StandIn()
        owner: Any = self._model if getattr(self._model, "decoder", None) is self._decoder else self._model.base_model
        owner.decoder = self._stand_in
        found = self._attention.kv_layers
        spec = found[0].tensors[0]
        if found != self.kv_spec.layers or (spec.num_heads, spec.width) != self.cross_kv[1:3]:
            raise ProbeError("its layers have other heads than its configuration says")

    def _trial(self, count: int) -> torch.Tensor:
        """Some different tokens, of which none is the padding."""
        padding = self._config.pad_token_id
        ids = [number for number in range(1, count + 2) if number != padding][:count]
        return torch.tensor(ids, device=self._device) % self.kv_spec.vocab_size

    def _check_trial(self, encoded: torch.Tensor, expected: torch.Tensor) -> None:
        """Encodes and decodes the same in two steps."""
        source, tokens = (self._trial(count) for count in (_TRIAL_SOURCE, _TRIAL_TOKENS))
        found = self._encoder.try_out(source)
        self._compare(found, encoded, "encodes")
        store = CrossStore(self, self.cross_kv, self._num_positions, self._dtype, self._device)
        store.keep(0, found)
        storage = self._attention.make_storage(1, _TRIAL_TOKENS)
        hidden = []
        for start, end in ((0, _TRIAL_CUT), (_TRIAL_CUT, _TRIAL_TOKENS)):
            rows = store.rows(np.zeros(end - start, dtype=np.int64))
            positions = torch.arange(start, end, device=self._device)
            metadata = row_metadata(start, end, rows, self._device)
            hidden.append(self.forward(tokens[start:end], positions, metadata, storage))
        self._compare(self.compute_logits(torch.cat(hidden)), expected, "decodes")

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, verb: str) -> None:
        most = _TRIAL_ROUNDING * ROUNDING[self._dtype] * float(expected.abs().max())
        if not float((found - expected).abs().max()) <= most:
            raise ProbeError(f"it {verb} otherwise when its attention is replaced")


def _first(config: Any, *names: str) -> int:
    """The first of these sizes that the configuration has; ValueError if it has none."""
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    raise ValueError(f"config.json: {names[0]} must be a positive integer.")
