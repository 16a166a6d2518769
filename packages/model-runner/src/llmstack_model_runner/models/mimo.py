"""MiMo: Qwen 2 with a layer that guesses a further token."""

from __future__ import annotations

from llmstack_model_runner.models.draft_head import HeadNames
from llmstack_model_runner.models.llama import Qwen2

_LAYERS = "model.mtp_layers."


class MiMo(Qwen2):
    """`MiMoForCausalLM`: MiMo 7B. Several layers may guess; the first one is asked again for further tokens."""

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames:
        layer = f"{_LAYERS}0."
        return HeadNames(
            layer=layer, embedding_norm=f"{layer}token_layernorm", hidden_norm=f"{layer}hidden_layernorm",
            join=f"{layer}input_proj", norm=f"{layer}final_layernorm", is_hidden_first=True,
        )  # fmt: skip

    def is_ignored(self, name: str) -> bool:
        """These layers are read for drafts alone."""
        return name.startswith(_LAYERS) or super().is_ignored(name)
