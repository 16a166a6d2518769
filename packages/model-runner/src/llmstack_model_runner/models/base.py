"""What every model offers the runner, and the loading of weights that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.weight_slot import WeightSlot

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ModelKVSpec:
    """Shape of the KV storage that a model needs per token, and its limits.

    Attributes:
        vocab_size: Width of the logits.
        max_model_len: Positions the model was made for.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class Model(ABC):
    """A model that turns token ids into hidden states. It is constructed without weights.

    Attributes:
        implementation: Whose modelling code runs, for logs and `/server_info`.
        keeps_numeric_contract: False where other operations than ours sum or multiply, so that a token's result may
            depend on how tokens are batched and cut into steps.
        root: Prefix of the checkpoint's names that some checkpoints leave out, such as `model.`.
        kv_spec: Set by the constructor.
    """

    implementation: ClassVar[str] = "llmstack"
    keeps_numeric_contract: ClassVar[bool] = True
    root: ClassVar[str] = "model."
    kv_spec: ModelKVSpec

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """`config` is the parsed config.json; a ValueError names a field that is wrong or not supported."""

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Name in the checkpoint to where the tensor goes: all the tensors the model needs."""

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Likewise, for tensors that some checkpoints have and others do without."""
        return {}

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states after the last norm; writes the tokens' keys and values into `kv_caches`, if there are any."""

    def limit_context(self, max_model_len: int) -> None:  # noqa: B027 - most models compute the same for any limit
        """Called once, before weights are loaded, with the longest context that will be served."""

    def finish_loading(self) -> None:  # noqa: B027 - a model without an output head of its own has nothing to finish
        """Called once after the last tensor was loaded."""

    def is_ignored(self, name: str) -> bool:
        """True for tensors that checkpoints carry and the model does not need."""
        return name.endswith(("rotary_emb.inv_freq", ".masked_bias"))

    def rename(self, name: str) -> str:
        """The slot's name for a name in a checkpoint."""
        return name

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load every tensor; each is asked for once and may be dropped after.

        Raises:
            ValueError: Tensors are missing, unexpected, doubled or of a wrong shape; the text names them.
        """
        with torch.inference_mode():
            optional = self.optional_slots()
            slots = self.slots() | optional
            unexpected: list[str] = []
            misshapen: list[str] = []
            for given_name, tensor in weights:
                renamed = self.rename(given_name)
                name = renamed if renamed in slots else f"{self.root}{renamed}"
                slot = slots.get(name)
                if slot is None:
                    if not self.is_ignored(given_name):
                        unexpected.append(given_name)
                elif not slot.fits(tensor):
                    misshapen.append(f"{given_name} {list(tensor.shape)} instead of {list(slot.shape)}")
                    del slots[name]
                else:
                    slots.pop(name).load(tensor)
            raise_on_mismatch(
                missing=[name for name in slots if name not in optional], unexpected=unexpected, misshapen=misshapen
            )


class CausalLM(Model):
    """A language model over the paged KV storage."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to float32 [n, vocab_size]."""


class Encoder(Model):
    """A model in which each token attends to the whole prompt: it has no KV storage, and its prompts come whole."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        token_types: torch.Tensor | None = None,  # [num_tokens] int64
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states of the last layer; `token_types` tell the texts of a pair apart, None is type 0 throughout."""


class Classifier(Model):
    """A model that gives each prompt a number for each of its labels, from the state that `EMBED` pools as well.

    Attributes:
        num_labels: Set by the constructor.
    """

    num_labels: int

    @abstractmethod
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to float32 [n, num_labels]."""


def raise_on_mismatch(*, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    """ValueError that names the tensors, if there are any."""
    found = {"of a wrong shape": misshapen, "missing": missing, "unexpected": unexpected}
    problems = [f"{kind}: {_enumerate(names)}" for kind, names in found.items() if names]
    if problems:
        raise ValueError(f"The weights do not fit the configuration; {'; '.join(problems)}.")


def _enumerate(names: list[str], max_names: int = 5) -> str:
    shown = ", ".join(name[:128] for name in names[:max_names])
    return shown if len(names) <= max_names else f"{shown} and {len(names) - max_names} more"
