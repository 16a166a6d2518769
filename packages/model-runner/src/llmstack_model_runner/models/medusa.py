"""Medusa's draft heads, each over one hidden state (Cai et al., 2024)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import Linear, OutputHead, WeightSlot, collect_slots
from llmstack_model_runner.models.base import Loadable
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.kv_spec import ModelKVSpec

_OWN_NAMES = re.compile(r"(\d+)\.(\d+)(\.linear)?\.(weight|bias)")


class MedusaHeads(Loadable):
    """Heads of residual blocks, each with an output head, or with one in common. Only the likeliest token counts.

    Attributes:
        num_heads: Tokens that are guessed at once.
        size: Numbers of a hidden state.
    """

    root: ClassVar[str] = ""

    def __init__(
        self, config: Mapping[str, Any], hidden_size: int, vocab_size: int, tensor_names: Collection[str],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Raises ValueError where the heads do not fit the served model."""
        refuse(config, "truncated_vocab_size", config.get("vocab_size"))
        for name, own in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
            if read_int(config, name, own) != own:
                raise ValueError(f"its {name} is {config[name]}, and that of the served model {own}")
        self.size = hidden_size
        self.num_heads = read_int(config, "num_heads", config.get("medusa_num_heads"))
        self._num_blocks = read_int(config, "num_hidden_layers", config.get("medusa_num_layers"))
        self._is_joined = read_bool(config, "original_lm_head", False)
        self.kv_spec = ModelKVSpec((), vocab_size, 0)
        has_bias = any(name.endswith(".bias") for name in tensor_names)
        self._blocks = [
            [
                Linear(hidden_size, {f"blocks.{head}.layers.{block}": hidden_size}, has_bias=has_bias,
                       dtype=dtype, device=device)
                for block in range(self._num_blocks)
            ]
            for head in range(self.num_heads)
        ]  # fmt: skip
        self._heads = [
            OutputHead(vocab_size, hidden_size, dtype=dtype, device=device, name=f"lm_heads.{head}")
            for head in range(1 if self._is_joined else self.num_heads)
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([*(layer for blocks in self._blocks for layer in blocks), *self._heads])

    def rename(self, name: str) -> str:
        """Names of vLLM, and those of Medusa itself: the number of the head and of its layer, the last of which is its
        output head."""
        name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
        found = _OWN_NAMES.fullmatch(name)
        if found is None:
            return name
        head, layer, _, kind = found.groups()
        is_last = int(layer) == self._num_blocks
        return f"lm_heads.{head}.{kind}" if is_last else f"blocks.{head}.layers.{layer}.{kind}"

    def finish_loading(self) -> None:
        for head in self._heads:
            head.finish_loading()

    def guess(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of one head: [n, hidden_size] to [n, vocab_size]."""
        for layer in self._blocks[number]:
            hidden = hidden + torch.nn.functional.silu(layer(hidden))
        return self._heads[0 if self._is_joined else number](hidden)
