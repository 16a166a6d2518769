"""The image processor of a checkpoint, by the class that its files name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles
from llmstack_media.processors.fixed_size import CLIPImageProcessor, LlavaImageProcessor, SiglipImageProcessor
from llmstack_media.processors.gemma3 import Gemma3ImageProcessor
from llmstack_media.processors.got_ocr2 import GotOcr2ImageProcessor
from llmstack_media.processors.idefics3 import Idefics3ImageProcessor, SmolVLMImageProcessor
from llmstack_media.processors.llava_next import LlavaNextImageProcessor
from llmstack_media.processors.pixtral import PixtralImageProcessor
from llmstack_media.processors.processor import ImageProcessor
from llmstack_media.processors.qwen2_vl import Qwen2VLImageProcessor

PROCESSORS: Mapping[str, type[ImageProcessor]] = {
    one.name: one
    for one in (
        CLIPImageProcessor, Gemma3ImageProcessor, GotOcr2ImageProcessor, Idefics3ImageProcessor, LlavaImageProcessor,
        LlavaNextImageProcessor, PixtralImageProcessor, Qwen2VLImageProcessor, SiglipImageProcessor,
        SmolVLMImageProcessor,
    )
}  # fmt: skip
_ENDINGS = ("Fast", "Pil")
# Names of older files, for the same classes.
_OLDER_NAMES = {
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "CLIPFeatureExtractor": "CLIPImageProcessor",
    "InternVLImageProcessor": "GotOcr2ImageProcessor",
}


def image_processor(
    preprocessor: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> ImageProcessor:
    """The processor that a checkpoint's files describe.

    Args:
        preprocessor: Contents of `preprocessor_config.json`; None where there is no such file.
        processor: Of `processor_config.json`. An `image_processor` inside of it comes first.
        tokenizer: Of `tokenizer_config.json`.
        model: Of `config.json`.

    Raises:
        ProcessorConfigError: No supported class is named, or its options are not supported.
    """
    files = CheckpointFiles(preprocessor or {}, processor or {}, tokenizer or {}, model or {})
    named = files.image.get("image_processor_type") or files.image.get("feature_extractor_type")
    if not isinstance(named, str):
        raise ProcessorConfigError("no file of this checkpoint names its image_processor_type")
    name = named
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    known = PROCESSORS.get(_OLDER_NAMES.get(name, name))
    if known is None:
        raise ProcessorConfigError(f"the image processor {named[:64]} is not supported; {', '.join(PROCESSORS)} are")
    return known.from_checkpoint(files)
