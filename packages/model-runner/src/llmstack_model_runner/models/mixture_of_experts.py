"""Mixtures of experts of the Llama family: Mixtral and Qwen 3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.weight_slot import AnyWeight, FileTensor, WeightPart
from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.llama import Llama, Qwen3, Settings, read_llama

# The tensors of all experts to the projections that they join.
_STACKS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


class Mixtral(Llama):
    """`MixtralForCausalLM`: experts in every layer with weights that sum to 1; one sliding window for all layers."""

    # transformers 5 has another name for the layer, and so have adapters of it.
    renamed: ClassVar[Mapping[str, str]] = {".mlp.experts.": ".block_sparse_moe.experts."}

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
        experts = ExpertSettings(
            *read_expert_numbers(config, 8, 2),
            inner_size=read_int(config, "intermediate_size"),
            is_normalised=True,
            name="block_sparse_moe",
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        return read_llama({"rms_norm_eps": 1e-5, **config}, window, experts=experts)


class StackedExpertWeights(Llama):
    """A model whose checkpoints have a tensor of each expert, or one of all experts of a layer."""

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors. A tensor of all experts (Qwen 3 VL, Qwen 3.5) is divided among them."""
        super().load_weights(part for weight in weights for part in self._single_experts(*weight))

    @property
    def _expert_input_size(self) -> int:
        """Width of what the experts compute."""
        return self._hidden_size

    def _single_experts(self, name: str, weight: AnyWeight) -> Iterator[tuple[str, AnyWeight]]:
        stem, _, kind = name.rpartition(".experts.")
        parts = _STACKS.get(kind) if stem else None
        if parts is None or isinstance(weight, UnreadWeight | AnyStoredWeight):
            yield name, weight
            return
        shape = tuple(weight.shape)
        if len(shape) != 3:
            raise ValueError(f"{name[:128]} has the shape {list(shape)[:4]}, which is not that of experts.")
        # As published they are [experts, inputs, outputs]; transformers turns round what has not its own shape.
        is_transposed = shape[1 if kind == "down_proj" else 2] != self._expert_input_size
        for number in range(shape[0]):
            for index, part in enumerate(parts):
                expert = _ExpertOfStack(weight, number, (index, len(parts)), is_transposed)
                yield f"{stem}.experts.{number}.{part}.weight", expert


class Qwen3Moe(StackedExpertWeights, Qwen3):
    """`Qwen3MoeForCausalLM`: Qwen 3 with experts in every layer or every n-th; one sliding window for all layers."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        # Without a head size it is that of the heads, not Qwen 3's.
        settings = super().read_settings({"head_dim": None, **config, "layer_types": None, "max_window_layers": 0})
        experts = ExpertSettings(
            *read_expert_numbers(config, 128, 8),
            inner_size=read_int(config, "moe_intermediate_size", 768),
            is_normalised=read_bool(config, "norm_topk_prob", False),
        )
        step, dense = read_int(config, "decoder_sparse_step", 1), read_dense_layers(config)
        layers = [
            layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
            for index, layer in enumerate(settings.layers)
        ]
        return replace(settings, layers=layers)


class _ExpertOfStack:
    """A matrix [outputs, inputs] of a tensor of all experts; only what is asked for is read."""

    def __init__(
        self, stack: torch.Tensor | FileTensor, number: int, share: tuple[int, int], is_transposed: bool
    ) -> None:
        """`share`: Place and number of the matrices that are joined by their outputs."""
        self._stack, self._number, self._share, self._is_transposed = stack, number, share, is_transposed

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, inputs = tuple(self._stack.shape)[1:][:: -1 if self._is_transposed else 1]
        return outputs // self._share[1], inputs

    def read(self, part: WeightPart | None) -> torch.Tensor:
        own = WeightPart(0, (range(self._number, self._number + 1),))
        stack = self._stack
        (expert,) = own.read(stack) if isinstance(stack, torch.Tensor) else stack.read(own)
        index, count = self._share
        matrix = (expert.t() if self._is_transposed else expert).chunk(count)[index]
        return matrix if part is None else part.read(matrix)


def read_expert_numbers(config: Mapping[str, Any], num_experts: int, num_choices: int) -> tuple[int, int]:
    """Number of experts, under either name that transformers writes, and number of experts per token."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = read_int(config, name, num_experts)
    num_choices = read_int(config, "num_experts_per_tok", num_choices)
    if num_choices > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok is {num_choices}, and there are {num_experts} experts.")
    return num_experts, num_choices


def read_dense_layers(config: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers without experts."""
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"config.json: mlp_only_layers must be a list of integers, got {str(layers)[:64]}.")
    return layers
