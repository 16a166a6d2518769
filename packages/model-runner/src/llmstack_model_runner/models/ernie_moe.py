"""ERNIE 4.5 with experts, and a dense layer that guesses a further token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.layers.weight_slot import AnyWeight
from llmstack_model_runner.models.config_values import read_float, read_int, refuse
from llmstack_model_runner.models.draft_head import HeadNames
from llmstack_model_runner.models.ernie import Ernie, read_ernie
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights

_GUESSING = "model.mtp_"
_CORRECTION = ".e_score_correction_bias"


class ErnieMoe(StackedExpertWeights, Ernie):
    """`Ernie4_5_MoeForCausalLM`: 21B and 300B. A softmax weighs experts, and a correction is added for the choice."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "use_bias", False)
        settings = read_ernie(config)
        experts = _read_experts(config)
        first = read_int(config, "moe_layer_start_index", 1, least=0)
        last = read_int(config, "moe_layer_end_index", -1, least=-1)
        last, interval = len(settings.layers) - 1 if last == -1 else last, read_int(config, "moe_layer_interval", 1)
        layers = [
            replace(layer, experts=experts) if first <= number <= last and not (number + 1) % interval else layer
            for number, layer in enumerate(settings.layers)
        ]
        return replace(settings, layers=layers)

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames:
        """The head's output has the norm of the model, as the one before it."""
        return HeadNames(
            layer=f"{_GUESSING}block.0.",
            embedding_norm=f"{_GUESSING}emb_norm.0",
            hidden_norm=f"{_GUESSING}hidden_norm.0",
            join=f"{_GUESSING}linear_proj.0",
            norm=None,
            is_dense=True,
        )

    def rename(self, name: str) -> str:
        """The correction stands beside the router in the hub's checkpoints, and in it in those of transformers 5."""
        return super().rename(name).replace(".gate.moe_statics.", ".gate.").replace(".moe_statics.", ".gate.")

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors; corrections are stored as those of one group of experts."""
        super().load_weights(_without_groups(weights))

    def is_ignored(self, name: str) -> bool:
        """The layer is read for drafts alone."""
        return name.startswith(_GUESSING) or super().is_ignored(name)


def _read_experts(config: Mapping[str, Any]) -> ExpertSettings:
    num_experts, num_choices = read_int(config, "moe_num_experts", 64), read_int(config, "moe_k", 6)
    routing = GroupedRouting(
        is_corrected=True,
        is_softmax=True,
        is_normalised=True,
        least_sum=read_float(config, "moe_norm_min", 1e-12),
    )
    routing.check(num_experts, num_choices)
    inner_size = read_int(config, "moe_intermediate_size", 1536)
    return ExpertSettings(
        num_experts,
        num_choices,
        inner_size,
        is_normalised=False,
        routing=routing,
        shared_size=inner_size * read_int(config, "moe_num_shared_experts", 2, least=0),
    )


def _without_groups(weights: Iterable[tuple[str, AnyWeight]]) -> Iterator[tuple[str, AnyWeight]]:
    for name, weight in weights:
        if not name.endswith(_CORRECTION) or isinstance(weight, UnreadWeight | AnyStoredWeight):
            yield name, weight
        else:
            correction = weight if isinstance(weight, torch.Tensor) else weight.read(None)
            yield name, correction.squeeze(0) if correction.ndim == 2 else correction
