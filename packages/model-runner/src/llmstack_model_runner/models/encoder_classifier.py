"""Encoders that tell prompts, or pairs of texts, apart by labels: two linear layers over the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import WeightSlot, collect_slots
from llmstack_model_runner.layers.small_linear import SmallLinear
from llmstack_model_runner.models.base import Classifier
from llmstack_model_runner.models.bert import Bert, Roberta
from llmstack_model_runner.models.config_values import read_num_labels
from llmstack_model_runner.models.distilbert import DistilBert


class BertClassifier(Bert, Classifier):
    """`BertForSequenceClassification`: its pooler, then a linear layer.

    Attributes:
        head_names: The tensors' names of the two layers.
    """

    head_names: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.num_labels = read_num_labels(config)
        hidden_size = self.kv_spec.num_kv_heads * self.kv_spec.head_dim
        dense, out = self.head_names
        self._dense = SmallLinear(dense, hidden_size, hidden_size, device=device)
        self._out = SmallLinear(out, hidden_size, self.num_labels, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return super().slots() | collect_slots([self._dense, self._out])

    @torch.inference_mode()
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        return self._out(self.activate(self._dense(states)))

    @staticmethod
    def activate(x: torch.Tensor) -> torch.Tensor:
        """What comes between the layers."""
        return torch.tanh(x)


class RobertaClassifier(BertClassifier, Roberta):
    """`RobertaForSequenceClassification` and `XLMRobertaForSequenceClassification`."""

    head_names: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")


class DistilBertClassifier(BertClassifier, DistilBert):
    """`DistilBertForSequenceClassification`."""

    head_names: ClassVar[tuple[str, str]] = ("pre_classifier", "classifier")

    @staticmethod
    def activate(x: torch.Tensor) -> torch.Tensor:
        """ReLU."""
        return torch.relu(x)
