"""Base classes of models, and the loading of weights that they share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from llmstack_kernels.linear import AnyStoredWeight
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.cross_attention import CrossKVSpec
from llmstack_model_runner.layers.weight_slot import AnyWeight, WeightSlot
from llmstack_model_runner.media.encoder import MediaEncoder
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec, ModelKVSpec
from llmstack_model_runner.sampling.logits_processor import LogitsProcessor

logger = logging.getLogger(__name__)

_MAX_LISTED = 100
_NO_SLOTS: Mapping[str, WeightSlot] = {}


class Loadable(ABC):
    """A module that is constructed without weights, and then filled with those of a checkpoint.

    Attributes:
        root: Prefix of tensor names that some checkpoints leave out, such as `model.`.
        renamed: Parts of tensors' names in a checkpoint, and their replacements in the names of slots, in this order.
        kv_spec: Shape of what it keeps in a KV storage; set by the constructor.
    """

    root: ClassVar[str] = "model."
    renamed: ClassVar[Mapping[str, str]] = {}
    kv_spec: ModelKVSpec

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that the model needs, by their names in the checkpoint."""

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Slots of tensors that only some checkpoints have."""
        return {}

    def finish_loading(self) -> None:  # noqa: B027 - a model without an output head of its own has nothing to finish
        """Called once, after the last tensor was loaded."""

    def is_ignored(self, name: str) -> bool:
        """Whether the model does not need a tensor that checkpoints contain."""
        return name.endswith(("rotary_emb.inv_freq", ".masked_bias"))

    def rename(self, name: str) -> str:
        """Name of the slot for a tensor's name in a checkpoint."""
        for part, ours in self.renamed.items():
            name = name.replace(part, ours)
        return name

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors, or this rank's part of them; each is read once and can be dropped afterwards.

        Tensors that the model does not expect are listed in one warning. A bias of a layer that has none must be zero.

        Raises:
            ValueError: Tensors are missing, doubled, of a wrong shape or not finite, or a bias would be ignored; the
                message names them.
        """
        with torch.inference_mode():
            filling = SlotFilling(self, self.slots(), self.optional_slots())
            for name, weight in weights:
                filling.take(name, weight)
            filling.finish()


class Model(Loadable):
    """A model that turns token ids into hidden states. It is constructed without weights.

    Attributes:
        implementation: Origin of the modelling code, for logs and `/server_info`.
        keeps_numeric_contract: False if the model uses foreign operations, so that a token's result may depend on how
            tokens are batched and cut into steps.
        can_be_sharded: Whether several ranks can each compute a part of the model.
        moves_positions: Whether tokens behind a picture have other positions than places. Host steps alone know them.
        loads_by_slots: Whether each tensor fills a slot when it is read; else all are read first.
        cross_kv: What layers with cross attention keep of an encoder's output; None for a model without.
    """

    implementation: ClassVar[str] = "llmstack"
    keeps_numeric_contract: ClassVar[bool] = True
    can_be_sharded: ClassVar[bool] = False
    moves_positions: ClassVar[bool] = False
    loads_by_slots: ClassVar[bool] = True
    cross_kv: CrossKVSpec | None = None

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """`config` is the parsed config.json; a ValueError names a field that is invalid or not supported."""

    @property
    def vector_size(self) -> int | None:
        """Width of a user's vectors that a step may have in place of tokens; None where it takes token ids alone."""
        return None

    @property
    def item_size(self) -> int | None:
        """Width of vectors of an encoder that a step may have in place of tokens; None where it may have none."""
        return self.vector_size

    def media_encoder(self) -> MediaEncoder | None:
        """The encoder of pictures, sounds or videos, whose weights only the first stage has; None for none."""
        return None

    def logits_processors(self, max_num_rows: int) -> Sequence[LogitsProcessor]:
        """Rules of its own for what may be generated, before those of a user; most have none."""
        return ()

    @property
    def alignment_size(self) -> int:
        """Numbers of each token that `align` gives; 0 for a model that does not."""
        return 0

    def align(self, metadata: AttentionMetadata, tokens: slice) -> torch.Tensor:  # [num_tokens, alignment_size] float32
        """The attention of one row's tokens to each vector of their item, once `forward` has run."""
        raise ValueError("this model aligns no tokens")

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states after the last norm. Writes the tokens' keys and values into `kv_caches`, if there are any."""

    def limit_context(self, max_model_len: int) -> None:
        """Called once, before weights are loaded, with the longest context that will be served."""

    def hold_positions(self, num_positions: int) -> None:
        """Called whenever a KV cache is made, with the most positions of a request that it can hold."""


class SlotFilling:
    """Tensors of a checkpoint on their way into the slots of a model, or of a part of it."""

    def __init__(
        self, model: Loadable, slots: Mapping[str, WeightSlot], optional: Mapping[str, WeightSlot] = _NO_SLOTS
    ) -> None:
        """`model`: Says what the slot of a tensor is called. `optional`: Slots that may stay empty."""
        self._model, self._optional = model, frozenset(optional)
        self._slots = {**slots, **optional}
        self._known = frozenset(self._slots)
        self._loaded: set[str] = set()
        self._unused: list[str] = []
        self._ignored_biases: list[str] = []
        self._doubled: list[str] = []
        self._misshapen: list[str] = []

    def take(self, given_name: str, weight: AnyWeight) -> None:
        """Fills the slot of a tensor, if it has one."""
        renamed = self._model.rename(given_name)
        name = renamed if renamed in self._slots or renamed in self._loaded else f"{self._model.root}{renamed}"
        slot = self._slots.get(name)
        if name in self._loaded:
            self._doubled.append(given_name)
        elif slot is None:
            if _is_bias_of(self._known, renamed, name):
                self._ignored_biases += [given_name] if _has_values(weight) else []
            elif not self._model.is_ignored(given_name):
                self._unused.append(given_name)
        elif misfit := _fill(self._slots.pop(name), given_name, weight):
            self._misshapen.append(misfit)
        else:
            self._loaded.add(name)

    def finish(self) -> None:
        """Raises ValueError if a tensor was missing, doubled or did not fit; warns of those without a slot."""
        raise_on_mismatch(
            missing=[name for name in self._slots if name not in self._optional], doubled=self._doubled,
            misshapen=self._misshapen, ignored_biases=self._ignored_biases, unused=self._unused,
        )  # fmt: skip


class CausalLM(Model):
    """A causal language model over the paged KV storage.

    Attributes:
        can_omit_tokens: Whether the last layer follows `AttentionMetadata.last_layer`, so that `forward` returns the
            states of its queries alone.
    """

    can_omit_tokens: ClassVar[bool] = False

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens as the first layer gets them: [n] to [n, hidden_size].

        Raises:
            ValueError: The model gives them to no draft head.
        """
        raise ValueError(f"{type(self).__name__} gives its embedding to no draft head")

    def keep_states(self, layers: Sequence[int]) -> None:
        """Makes `forward` keep the states after so many layers in `kept_states`; no layers are none.

        Raises:
            ValueError: The model keeps none, or has fewer layers.
        """
        raise ValueError(f"{type(self).__name__} keeps no states between its layers")

    @property
    def kept_states(self) -> Sequence[torch.Tensor]:  # each [num_tokens, hidden_size]
        """The states that the last `forward` has kept."""
        return ()

    def draft_head_spec(self) -> tuple[LayerKVSpec, float] | None:
        """The memory of the layer that guesses a further token, and its weights over all others; None without one."""
        return None

    def draft(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        positions: torch.Tensor,  # [num_tokens] int64
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states of the token after the next, from those at these places and the tokens that follow them."""
        raise ValueError("this model has no layer that guesses a further token")

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states: [n, hidden_size] to float32 [n, vocab_size]."""


class Encoder(Model):
    """A model in which each token attends to the whole prompt. It has no KV storage and computes whole prompts only."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        token_types: torch.Tensor | None = None,  # [num_tokens] int64
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """Hidden states of the last layer. `token_types` distinguishes the texts of a pair; None means type 0."""


class Classifier(Model):
    """A model that computes a logit for each label from the hidden state that the task `EMBED` pools.

    Attributes:
        num_labels: Number of labels; set by the constructor.
    """

    num_labels: int

    @abstractmethod
    def compute_label_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of pooled states: [n, hidden_size] to float32 [n, num_labels]."""


def raise_on_mismatch(
    *,
    missing: list[str],
    misshapen: list[str],
    unused: list[str],
    doubled: Sequence[str] = (),
    ignored_biases: Sequence[str] = (),
) -> None:
    """Raises ValueError that names the tensors, if there are any; `unused` ones alone are a warning."""
    found = {
        "of a wrong shape": misshapen,
        "missing": missing,
        "twice": [*doubled],
        "biases that are not zero, of layers that have none": [*ignored_biases],
    }
    problems = [f"{kind}: {_enumerate(names)}" for kind, names in found.items() if names]
    if problems:
        problems += [f"unexpected: {_enumerate(unused)}"] if unused else []
        raise ValueError(f"The weights do not fit the configuration; {'; '.join(problems)}.")
    if unused:
        shown = _enumerate(sorted(unused), _MAX_LISTED)
        logger.warning("%d tensors of the checkpoint are unexpected and not used: %s", len(unused), shown)


def _is_bias_of(slot_names: frozenset[str], *names: str) -> bool:
    """Whether one of the names is that of a bias beside an expected weight. GPTQ writes such biases, all zero."""
    stems = [name.removesuffix("bias") for name in names if name.endswith(".bias")]
    return any(f"{stem}weight" in slot_names for stem in stems)


def _has_values(weight: AnyWeight) -> bool:
    """Whether a tensor is not zero throughout; NaN is a value."""
    if isinstance(weight, UnreadWeight | AnyStoredWeight):
        return True
    tensor = weight if isinstance(weight, torch.Tensor) else weight.read(None)
    return bool(tensor.count_nonzero())


def _fill(slot: WeightSlot, name: str, weight: AnyWeight) -> str:
    """Fills a slot; returns a text if the weight has another shape, else an empty one."""
    load_table = slot.load_table if isinstance(weight, UnreadWeight) and weight.is_table else None
    if isinstance(weight, UnreadWeight):
        if slot.skip is not None:
            slot.skip()
            return ""
        weight = weight.read()
    if not slot.fits(weight):
        return f"{name} {list(weight.shape)} instead of {list(slot.shape)}"
    if slot.skip is not None:
        slot.skip()
        return ""
    try:
        if load_table is not None and isinstance(weight, AnyStoredWeight):
            load_table(weight)
        else:
            slot.put(weight)
    except ValueError as error:
        raise ValueError(f"The weights cannot be loaded: {name[:128]} {error}.") from None
    return ""


def _enumerate(names: list[str], max_names: int = 5) -> str:
    shown = ", ".join(name[:128] for name in names[:max_names])
    return shown if len(names) <= max_names else f"{shown} and {len(names) - max_names} more"
