"""Models that take pictures or sound: an encoder beside a text model."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from llmstack_media import ProcessorConfigError, processors
from llmstack_model_files import WHOLE_CONFIG
from llmstack_model_runner.architectures import encoder_of
from llmstack_model_runner.encoders.prompt_encoder import PromptEncoder
from llmstack_model_runner.layers.adaptation import adapted
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import AnyWeight, WeightSlot, unread
from llmstack_model_runner.models.base import Model, SlotFilling
from llmstack_model_runner.models.image_files import IMAGE_FILES
from llmstack_model_runner.models.text_part import TextPart

_IDS_ONLY = "The text model takes token ids only, and no vectors of pictures or sound (--language-model-only)."


class PictureModel(TextPart):
    """Mixin that encodes pictures or sound. Only the first stage has its weights, all of them in every rank."""

    encoder_class: type[PromptEncoder]

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)  # type: ignore[safe-super]  # the text model's class follows this one
        whole, files = config[WHOLE_CONFIG], config[IMAGE_FILES]
        try:
            found = processors(
                files["preprocessor_config"], files["processor_config"], model=whole,
                video_preprocessor=files["video_preprocessor_config"],
            )  # fmt: skip
        except ProcessorConfigError as error:
            raise ValueError(f"What this model takes besides text cannot be prepared: {error}.") from error
        if self.item_size is None:
            raise ValueError(_IDS_ONLY)
        self._has_encoder = sharding().is_first_stage
        with adapted(None):  # adapters change the language model alone
            self._encoder = self.encoder_class.of(whole, self.item_size, found, dtype, device)
        num_deep, num_layers = self._encoder.num_deep, self.kv_spec.num_layers
        # The model's last layer may leave out the tokens that its vectors would be added to.
        if self._has_encoder and num_deep > num_layers - sharding().is_last_stage:
            raise ValueError(
                f"Pictures change the output of {num_deep} decoder layers, of which none is the model's last. "
                f"The first pipeline stage has {num_layers}, which are too few."
            )

    def media_encoder(self) -> PromptEncoder:
        return self._encoder

    def slots(self) -> dict[str, WeightSlot]:
        own = self._encoder.slots()
        text = super().slots()  # type: ignore[safe-super]  # as above
        return text | (own if self._has_encoder else unread(own))

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors; where the text model's are not read one by one, those of the encoder are on their way."""
        if self.loads_by_slots:
            super().load_weights(weights)
            return
        own = SlotFilling(self, self._encoder.slots())
        super().load_weights(self._without_own(weights, own))
        own.finish()

    def _without_own(
        self, weights: Iterable[tuple[str, AnyWeight]], own: SlotFilling
    ) -> Iterator[tuple[str, AnyWeight]]:
        for name, weight in weights:
            if self._encoder.own_name(name) is None:
                yield name, weight
            else:
                own.take(name, weight)

    def finish_loading(self) -> None:
        """Finishes both parts.

        Raises:
            ValueError: The text model does not take vectors of the encoder.
        """
        super().finish_loading()
        if self._has_encoder:
            self._encoder.finish_loading()
        if self.item_size is None:  # some code shows that only once it runs
            raise ValueError(_IDS_ONLY)

    def rename(self, name: str) -> str:
        return self._encoder.own_name(name) or super().rename(name)

    def is_ignored(self, name: str) -> bool:
        """Whether nothing needs the tensor: of the encoder, only those that its family names."""
        own = self._encoder.own_name(name)
        return super().is_ignored(name) if own is None else own.startswith(self._encoder.ignored)


def make_picture_model(model_class: type[Model], config: Mapping[str, Any]) -> type[Model]:
    """The class of a model that takes pictures or sound, with this text model. `config`: Of the text model."""
    module, _, name = (encoder_of(config[WHOLE_CONFIG]) or "").partition(":")
    encoder_class: type[PromptEncoder] = getattr(importlib.import_module(module), name)
    between = encoder_class.text_class
    bases: tuple[type, ...] = (PictureModel, *([between] if between is not None else []), model_class)
    return type(f"{model_class.__name__}WithPictures", bases, {"encoder_class": encoder_class})
