"""Sizes of a tower over frames of sound, out of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llmstack_model_runner.encoders.layer import LayerSettings
from llmstack_model_runner.encoders.whisper import SpeechSizes
from llmstack_model_runner.models.config_values import read_head_dim, read_int, refuse

_EPS: Final = 1e-5
Field = tuple[str, int]
"""A field's name, and its value where it is absent."""


class TowerFields(NamedTuple):
    """The fields that say the sizes, which differ between classes; by default those of Whisper large."""

    size: Field = ("d_model", 1280)
    inner_size: Field = ("encoder_ffn_dim", 5120)
    num_layers: Field = ("encoder_layers", 32)
    num_heads: Field = ("encoder_attention_heads", 20)
    num_bins: Field = ("num_mel_bins", 128)


LARGE: Final = TowerFields()


def audio_fields(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `audio_config` of a configuration; all of its fields have defaults."""
    found = whole.get("audio_config")
    return found if isinstance(found, Mapping) else {}


def read_tower(config: Mapping[str, Any], fields: TowerFields = LARGE) -> tuple[SpeechSizes, LayerSettings]:
    """Sizes of the tower and of its layers.

    Raises:
        ValueError: A size is none, or heads do not divide the width.
    """
    refuse(config, "scale_embedding", False)
    size, num_heads = read_int(config, *fields.size), read_int(config, *fields.num_heads)
    read_head_dim(size, num_heads)
    activation = str(config.get("activation_function") or "gelu")
    sizes = SpeechSizes(
        read_int(config, *fields.num_bins),
        read_int(config, "max_source_positions", 1500),
        read_int(config, *fields.num_layers),
    )
    return sizes, LayerSettings(size, read_int(config, *fields.inner_size), num_heads, _EPS, activation)
