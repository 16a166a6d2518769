"""Causal language models of transformers, as models of the runner."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from llmstack_model_runner.layers.adaptation import adapted_layers
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec, keys_and_values
from llmstack_model_runner.models.transformers_backend.attention import (
    IMPLEMENTATION,
    PROBE_IMPLEMENTATION,
    PagedAttention,
    install,
)
from llmstack_model_runner.models.transformers_backend.base import TransformersBase
from llmstack_model_runner.models.transformers_backend.head import OutputLines, find_decoder
from llmstack_model_runner.models.transformers_backend.probe import (
    check_only_attention_connects,
    check_rows_are_independent,
    find_layers,
    find_linears_of_tokens,
    run_rows,
)
from llmstack_model_runner.models.transformers_backend.resolve import (
    max_model_len,
    resolve,
)

logger = logging.getLogger(__name__)


class TransformersModel(TransformersBase, CausalLM):
    """Any decoder of transformers whose attention can be replaced.

    `kv_spec` follows the configuration until the weights are loaded, and then what the probe observed.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._model_class = resolve(config)
        self._dtype = dtype
        self._device = device
        self._attention_name = PROBE_IMPLEMENTATION
        self._adapted = adapted_layers()
        self.kv_spec = _declared_spec(self._config)

    @torch.inference_mode()
    def finish_loading(self) -> None:
        """Packs the layers, and probes on a few tokens what attention the model needs.

        Raises:
            UnsupportedByTransformersError: Paged attention does not support it.
        """
        self._pack(self._model, is_needed=self._adapted is not None)
        self._decoder: Any = find_decoder(self._model)
        self._output_class: type[Any] = dict
        if self._decoder is self._model:
            raise self._unsupported("its decoder cannot be separated from its head")
        with self.trial():
            self._probe()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states that the decoder returns."""
        self._attention.begin(metadata, kv_caches)
        return self._run(token_ids, positions, metadata.vectors)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows, by the model's own code."""
        return self._output_lines(hidden, self._output_class)

    @property
    def vector_size(self) -> int | None:
        """The width, where the decoder gives the same states for a token's vector as for its id.

        Before the weights are loaded it is what the configuration says.
        """
        return self._found_vector_size if hasattr(self, "_decoder") else self._config.hidden_size

    @functools.cached_property
    @torch.inference_mode()
    def _found_vector_size(self) -> int | None:
        places = torch.arange(2, device=self._device)
        try:
            vectors = self._decoder.get_input_embeddings()(places)
            by_vectors = functools.partial(self._run, given=StepVectors(places, vectors))
            found = run_rows(self._decoder, by_vectors, self._attention, [2], [0, 1])
        except Exception:  # model code can raise anything if it needs the ids
            logger.info("the decoder takes token ids only", exc_info=True)
            return None
        is_same = torch.equal(found, run_rows(self._decoder, self._run, self._attention, [2], [0, 1]))
        return vectors.shape[-1] if is_same else None

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, given: StepVectors | None = None) -> torch.Tensor:
        tokens: dict[str, torch.Tensor] = {"input_ids": token_ids[None]}
        if given is not None:
            vectors = self._decoder.get_input_embeddings()(token_ids)
            tokens = {"inputs_embeds": vectors.index_copy(0, given.places, given.vectors)[None]}
        output = self._decoder(**tokens, position_ids=positions[None], use_cache=False, return_dict=True)
        self._output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _probe(self) -> None:
        spec, decoder = self.kv_spec, self._decoder
        layers = find_layers(decoder, self._run, self._dtype, self._config)
        check_only_attention_connects(decoder, decoder.get_input_embeddings(), self._run)
        if self._adapted is not None:
            names = {module: name for name, module in self._model.named_modules()}
            for layer in find_linears_of_tokens(decoder, decoder.get_input_embeddings(), self._run):
                layer.adapt(names[layer], self._adapted)
        self._attention = PagedAttention(layers, self._dtype, self._device)
        if all(
            layer.num_selected is None for layer in layers
        ):  # an indexer needs masks, though its choice has no effect
            self._model.set_attn_implementation(IMPLEMENTATION)
        install(decoder, self._attention)
        check_rows_are_independent(decoder, decoder.get_input_embeddings(), self._run, self._attention)
        install(decoder, self._attention)
        self._output_lines = OutputLines(self._model, decoder)
        logits = self.compute_logits(run_rows(decoder, self._run, self._attention, [2], [0, 1]))
        self.kv_spec = dataclasses.replace(
            spec,
            layers=self._attention.kv_layers,
            vocab_size=logits.shape[1],
        )


def _declared_spec(config: PreTrainedConfig) -> ModelKVSpec:
    """The memory by the configuration, of its first layer where layers differ."""
    num_heads = _number(config, "num_attention_heads", 1)
    layer = keys_and_values(
        _number(config, "num_key_value_heads", num_heads),
        _number(config, "head_dim", _number(config, "hidden_size", 1) // num_heads) or 1,
    )
    return ModelKVSpec(
        (layer,) * _number(config, "num_hidden_layers", 1),
        vocab_size=int(config.vocab_size),
        max_model_len=max_model_len(config),
    )


def _number(config: PreTrainedConfig, name: str, default: int) -> int:
    """A size; the default where the configuration has none for all layers."""
    try:
        found = getattr(config, name, None)
    except RuntimeError:  # it differs between layers
        return default
    return found if isinstance(found, int) and found else default
