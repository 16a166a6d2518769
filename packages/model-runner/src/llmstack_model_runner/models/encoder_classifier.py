"""Encoder classifiers: two linear layers over a prompt's first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import SmallLinear
from llmstack_model_runner.models.base import Classifier
from llmstack_model_runner.models.bert import Bert, Roberta
from llmstack_model_runner.models.config_values import read_num_labels
from llmstack_model_runner.models.distilbert import DistilBert


class BertClassifier(Bert, Classifier):
    """`BertForSequenceClassification`: a pooler, then a linear layer.

    Attributes:
        head_names: Tensor names of the two layers.
    """

    head_names: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.num_labels = read_num_labels(config)
        hidden_size = self._tokens.size
        dense, out = self.head_names
        self._dense = SmallLinear(dense, hidden_size, hidden_size, device=device)
        self._out = SmallLinear(out, hidden_size, self.num_labels, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        return super().slots() | collect_slots([self._dense, self._out])

    @torch.inference_mode()
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._out(self.activate(self._dense(states)))

    @staticmethod
    def activate(x: torch.Tensor) -> torch.Tensor:
        """Activation between the two layers."""
        return torch.tanh(x)


class RobertaClassifier(BertClassifier, Roberta):
    """`RobertaForSequenceClassification` and `XLMRobertaForSequenceClassification`, with layers of other names."""

    head_names: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")


class DistilBertClassifier(BertClassifier, DistilBert):
    """`DistilBertForSequenceClassification`, with ReLU between the layers."""

    head_names: ClassVar[tuple[str, str]] = ("pre_classifier", "classifier")

    @staticmethod
    def activate(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
