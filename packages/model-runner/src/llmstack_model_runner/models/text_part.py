"""Text models of checkpoints that have parts for images or sound too."""

from __future__ import annotations

from llmstack_model_runner.models.base import Model

_SPEAKING = ("talker.", "token2wav.")
"""Of tensors of what speaks the text, which is not served."""
_THINKER = "thinker."
# Prefixes of the text model's tensors, as several generations of checkpoints write them; the first that fits counts.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Of all other tensors, behind an optional `model.`.
_OTHER_PARTS = ("vision_tower.", "vision_model.", "vision_encoder.", "vision_projection.", "visual.", "audio_tower.",
                "audio_encoder.", "audio_adapter.", "multi_modal_projector.", "connector.", "mlp1.", "embed_vision.",
                "embed_audio.", "image_newline")  # fmt: skip


class TextPart(Model):
    """Mixin that finds the tensors of the text model and leaves out those of other parts."""

    def rename(self, name: str) -> str:
        """Name of the tensor in a checkpoint of the text model alone, renamed as its class does."""
        return super().rename(_own_name(name))

    def is_ignored(self, name: str) -> bool:
        """Whether the tensor belongs to another part, or the text model does not need it."""
        inner = name.removeprefix(_THINKER).removeprefix("model.")
        return inner.startswith(_OTHER_PARTS) or name.startswith(_SPEAKING) or super().is_ignored(_own_name(name))


def make_text_part(model_class: type[Model]) -> type[Model]:
    """The class for checkpoints that have more than this text model."""
    return type(f"{model_class.__name__}OfParts", (TextPart, model_class), {})


def _own_name(name: str) -> str:
    name = name.removeprefix(_THINKER)
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
