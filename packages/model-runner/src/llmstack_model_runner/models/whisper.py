"""Whisper: a decoder that attends to an encoder of sound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_files import SpeechTokens, parse_speech_tokens
from llmstack_model_runner.encoders.whisper import WhisperEncoder
from llmstack_model_runner.layers import WeightSlot
from llmstack_model_runner.layers.adaptation import adapted
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache
from llmstack_model_runner.layers.cross_attention import CrossKVSpec, CrossNames
from llmstack_model_runner.models.config_values import refuse
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.image_files import GENERATION_FILE
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder, PositionTable
from llmstack_model_runner.models.opt import NAMES
from llmstack_model_runner.models.sound_config import TowerFields, read_tower
from llmstack_model_runner.sampling.logits_processor import LogitsProcessor
from llmstack_model_runner.sampling.speech_rules import SpeechRules

_PREFIX = "model.decoder."
_ENCODER = TowerFields(
    ("d_model", 384), ("encoder_ffn_dim", 1536), ("encoder_layers", 4), ("encoder_attention_heads", 6),
    ("num_mel_bins", 80),
)  # fmt: skip
_DECODER = DecoderFields(
    size=("d_model", 384), num_layers=("decoder_layers", 4), num_heads=("decoder_attention_heads", 6),
    inner_size=("decoder_ffn_dim", 1536), max_model_len=("max_target_positions", 448), vocab_size=("vocab_size", 51865),
    eps=None, activation=("activation_function", "gelu"), is_tied=True,
)  # fmt: skip
_CROSS = CrossNames(
    "encoder_attn_layer_norm", "encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj",
    "encoder_attn.out_proj",
)  # fmt: skip


class Whisper(LayerNormDecoder):
    """`WhisperForConditionalGeneration`: Whisper tiny to large-v3, and those of English alone."""

    renamed: ClassVar[Mapping[str, str]] = {"proj_out.": "lm_head."}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._speech_tokens = _read_speech_tokens(config, self._settings)
        with adapted(None):  # adapters change the decoder alone
            self._encoder = _make_encoder(config, dtype, device)
        own = self.kv_spec.layers[0].tensors[0]
        self.cross_scale = own.width**-0.5
        num_layers = len(self.kv_spec.model_layers or self.kv_spec.layers)
        self.cross_kv = CrossKVSpec(
            self.kv_spec.num_layers, own.num_heads, own.width, self._encoder.num_states,
            vector_size=2 * num_layers * self._settings.block.hidden_size,
        )  # fmt: skip

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "scale_embedding", False)
        return read_decoder(
            config, _DECODER, replace(NAMES, cross=_CROSS), tokens=_PREFIX + "embed_tokens", layers=_PREFIX + "layers.",
            norm=_PREFIX + "layer_norm", positions=PositionTable(_PREFIX + "embed_positions"),
            parts_without_bias=("self_attn.k_proj",),
        )  # fmt: skip

    @property
    def vector_size(self) -> int | None:
        """The width of the encoder's states. No vector stands in place of a token."""
        return self._encoder.size

    def media_encoder(self) -> WhisperEncoder:
        return self._encoder

    def slots(self) -> dict[str, WeightSlot]:
        """Every stage has the encoder: its layers attend to what it makes."""
        return super().slots() | self._encoder.slots()

    def logits_processors(self, max_num_rows: int) -> Sequence[LogitsProcessor]:
        return [SpeechRules(self._speech_tokens, max_num_rows)]

    def cross_keys_and_values(self, encoded: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a window in each layer of this stage, from its states [num_states, size]."""
        start = self.kv_spec.first_layer
        for layer in self._layers[start : start + self.kv_spec.num_layers]:
            if layer.cross is not None:
                yield layer.cross.keys_and_values(encoded)

    @property
    def alignment_size(self) -> int:
        """The number of heads that follow the sound, in order; 0 where stages have some of their layers each."""
        is_possible = self._sharding.num_stages == 1
        return len(self._speech_tokens.alignment_heads) * self._encoder.num_states if is_possible else 0

    def align(self, metadata: AttentionMetadata, tokens: slice) -> torch.Tensor:
        """The weights of these heads, [num_tokens, num_heads * num_states]; ranks add what each has of them.

        They are 0 behind the end of a short window.
        """
        rows = metadata.cross
        if rows is None or rows.queries is None or not self.alignment_size:
            raise ValueError("the queries of this step were not kept, or no heads follow the sound")
        blocks, num_states = rows.block_tables[tokens.start].long(), self._encoder.num_states
        length = rows.seq_lens_list[tokens.start]
        own = self._sharding.share(self._settings.block.num_heads)
        like = rows.queries[0]
        weights = like.new_zeros((tokens.stop - tokens.start, self.alignment_size), dtype=torch.float32)
        for place, (layer, head) in enumerate(self._speech_tokens.alignment_heads):
            if head in own:
                queries = rows.queries[layer][tokens, head - own.start].float()
                keys = rows.caches[layer][0][blocks, head - own.start].flatten(0, 1)[:length].float()
                columns = slice(place * num_states, place * num_states + length)
                weights[:, columns] = (queries @ keys.t() * self.cross_scale).softmax(-1)
        return self._sharding.all_reduce(weights)

    def _caches(self, kv_caches: KVCaches, metadata: AttentionMetadata) -> Iterable[LayerCache]:
        if metadata.cross is None:
            raise ValueError("a step of a model with cross attention has no rows of it")
        return ((*own, *cross) for own, cross in zip(kv_caches, metadata.cross.caches, strict=True))


def _make_encoder(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> WhisperEncoder:
    return WhisperEncoder(*read_tower(config, _ENCODER), dtype, device)


def _read_speech_tokens(config: Mapping[str, Any], settings: DecoderSettings) -> SpeechTokens:
    vocab_size, num_layers, num_heads = settings.vocab_size, settings.num_layers, settings.block.num_heads
    tokens = parse_speech_tokens(config[GENERATION_FILE])
    named = (*tokens.languages.values(), *tokens.tasks.values(), *tokens.suppressed, *tokens.begin_suppressed)
    largest = max(tokens.first_timestamp, tokens.start, tokens.end, tokens.previous or 0, *named)
    if any(layer >= num_layers or head >= num_heads for layer, head in tokens.alignment_heads):
        raise ValueError("generation_config.json names an alignment head that the model does not have.")
    if largest >= vocab_size:
        raise ValueError(f"generation_config.json names the token {largest}, which the vocabulary does not have.")
    return tokens
