"""Files of a checkpoint that a model with pictures, videos or sound reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from llmstack_model_files import SPEECH_ARCHITECTURE, TEXT_PART_OF, WHOLE_CONFIG, read_json
from llmstack_model_runner.architectures import (
    BACKEND_ENCODER,
    BACKEND_TOWERS,
    PICTURE_ENCODERS,
    SOUND_ENCODERS,
    encoder_of,
)

logger = logging.getLogger(__name__)

IMAGE_FILES: Final = "image_files"
"""Field of a configuration whose model takes pictures or sound: contents of the files of its processor."""


GENERATION_FILE: Final = "generation_file"
"""Field of a configuration whose model transcribes: content of `generation_config.json`, with its special tokens."""


def with_generation_file(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The configuration of a model, with the file of its special tokens if it transcribes.

    Raises:
        ModelFilesError: It is not there, or is damaged.
    """
    if SPEECH_ARCHITECTURE not in (config.get("architectures") or ())[:1]:
        return config
    return {**config, GENERATION_FILE: read_json(folder, "generation_config.json")}


def with_image_files(
    config: Mapping[str, Any], folder: Path, *, is_text_only: bool, is_native_only: bool = False
) -> Mapping[str, Any]:
    """The configuration of a model, with the files of its processor if it is to take pictures or sound.

    `is_text_only`: Whether it is asked for its text alone. So it is without such a file, or with a tower that no code
    runs; both are logged. `is_native_only`: Whether transformers must not run the tower.

    Raises:
        ModelFilesError: A file is damaged.
    """
    whole = str(config.get(TEXT_PART_OF))
    tables: tuple[Mapping[str, object], ...] = (PICTURE_ENCODERS, BACKEND_TOWERS, SOUND_ENCODERS)
    if is_text_only or not any(whole in table for table in tables):
        return config
    encoder = encoder_of(config[WHOLE_CONFIG])
    if encoder is None:
        tower = config[WHOLE_CONFIG]["vision_config"]["model_type"]
        logger.warning("%s takes no pictures here: its tower %s is not supported", whole, str(tower)[:64])
        return config
    if encoder == BACKEND_ENCODER and (is_native_only or find_spec("transformers") is None):
        reason = "model_impl llmstack leaves out" if is_native_only else "is not installed"
        logger.warning("%s takes no pictures here: its encoder runs in the package transformers, which %s",
                       whole, reason)  # fmt: skip
        return config
    names = ("preprocessor_config", "processor_config", "video_preprocessor_config")
    files = {name: read_json(folder, f"{name}.json", required=False) for name in names}
    if not any(files[name] for name in names[:2]):
        logger.warning("%s takes text alone here: neither preprocessor_config.json nor processor_config.json is "
                       "there, which would say how pictures or sound are prepared", whole)  # fmt: skip
        return config
    return {**config, IMAGE_FILES: files}
