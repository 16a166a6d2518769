"""Classifiers of transformers over an encoder: labels of prompts, and of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from llmstack_model_runner.models.base import Classifier
from llmstack_model_runner.models.config_values import read_num_labels
from llmstack_model_runner.models.transformers_backend.encoder import TransformersTextEncoder
from llmstack_model_runner.models.transformers_backend.encoder_classes import encoder_part
from llmstack_model_runner.models.transformers_backend.head import StandIn
from llmstack_model_runner.models.transformers_backend.probe import ROUNDING, ProbeError
from llmstack_model_runner.models.transformers_backend.row_probe import trial_rows


class TransformersClassifier(TransformersTextEncoder, Classifier):
    """An encoder with a head of labels: the code of the whole class, behind states that are already computed.

    Attributes:
        is_of_mean: Whether labels of a prompt are those of the average of its states, not of the first one.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.num_labels = read_num_labels(config)
        self.is_of_mean = config.get("classifier_pooling") == "mean"

    @torch.inference_mode()
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of states [n, hidden_size], each as that of a prompt of one token."""
        rows = states[:, None]
        pooled = {} if self._pooler is None else {"pooler_output": self._pooler(rows)}
        self._stand_in.output = self._code.output_class(last_hidden_state=rows, **pooled)
        ones = torch.ones(rows.shape[:2], dtype=torch.int64, device=states.device)  # some models count tokens
        logits: torch.Tensor = self._model(input_ids=ones, attention_mask=ones, return_dict=True).logits
        self._stand_in.output = None
        return logits.reshape(len(states), -1).float()

    def _pack_encoder(self) -> None:
        """Packs all layers but those of the head, which are computed in float32."""
        encoder: Any = encoder_part(self._model)
        pooler = encoder._modules.pop("pooler", None)
        self._pack(encoder)
        if pooler is not None:
            encoder.pooler = pooler

    def _check_head(self) -> None:
        """Takes the head out of the model, and requires the logits that the whole gives.

        Raises:
            ProbeError: They are of something else than the states that are pooled.
        """
        rows = trial_rows(self.kv_spec.vocab_size, self._longest, self._device)
        prompt = rows.token_ids[None, rows.starts[1] : rows.starts[2]]
        expected = self._whole(prompt)
        hidden = self._rows(prompt[0], torch.arange(prompt.shape[1], device=self._device), [0, prompt.shape[1]])
        encoder: Any = encoder_part(self._model)
        self._pooler = _find_pooler(encoder)
        self._stand_in = StandIn()
        setattr(self._model, self._model.base_model_prefix, self._stand_in)
        self._model.float()
        if self._pooler is not None:
            encoder.pooler.float()
        if self.labels == "token":
            states = hidden
        else:
            states = hidden.float().mean(0, keepdim=True) if self.is_of_mean else hidden[:1]
        found = self.compute_label_logits(states.float())
        if found.shape != expected.shape:
            raise ProbeError(f"its head has {expected.shape[-1]} labels of {len(expected)} states")
        if not (found - expected).abs().max() <= ROUNDING[self._dtype] * expected.abs().max().clamp(min=1.0):
            raise ProbeError("its labels are not those of the states that are pooled")

    def _whole(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of one prompt by the whole class: [1 or length, num_labels]."""
        serving = self._model.config._attn_implementation
        self._model.set_attn_implementation(self._own_attention)
        logits: torch.Tensor = self._model(input_ids=token_ids, return_dict=True).logits
        self._model.set_attn_implementation(serving)
        return logits.reshape(-1, logits.shape[-1]).float()


def _find_pooler(encoder: Any) -> Any:
    """The function from states [n, 1, hidden_size] to the pooler's output; None without a pooler."""
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        return None
    if isinstance(pooler, nn.Linear):  # of ALBERT and BigBird, whose activation is a module beside it
        activation = getattr(encoder, "pooler_activation", None) or encoder.activation
        return lambda rows: activation(pooler(rows[:, 0]))
    return pooler
