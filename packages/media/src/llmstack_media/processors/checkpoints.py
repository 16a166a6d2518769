"""The processors of a checkpoint, by the classes and types that its files name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles
from llmstack_media.processors.fixed_size import CLIPImageProcessor, LlavaImageProcessor, SiglipImageProcessor
from llmstack_media.processors.gemma3 import Gemma3ImageProcessor
from llmstack_media.processors.gemma4 import Gemma4ImageProcessor
from llmstack_media.processors.gemma4_sound import Gemma4SoundProcessor
from llmstack_media.processors.got_ocr2 import AyaVisionImageProcessor, GotOcr2ImageProcessor
from llmstack_media.processors.granite_speech import GraniteSpeechProcessor
from llmstack_media.processors.idefics3 import Idefics3ImageProcessor, SmolVLMImageProcessor
from llmstack_media.processors.llava_next import LlavaNextImageProcessor
from llmstack_media.processors.llava_onevision import LlavaOnevisionImageProcessor, LlavaOnevisionVideoProcessor
from llmstack_media.processors.pixtral import LightOnOcrImageProcessor, PixtralImageProcessor
from llmstack_media.processors.processor import ImageProcessor
from llmstack_media.processors.qwen2_audio import Qwen2AudioProcessor
from llmstack_media.processors.qwen2_vl import Qwen2VLImageProcessor
from llmstack_media.processors.qwen_omni import Qwen2_5OmniProcessor
from llmstack_media.processors.qwen_video import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from llmstack_media.processors.sound import SoundProcessor
from llmstack_media.processors.video import VideoProcessor
from llmstack_media.processors.voxtral import VoxtralProcessor

PROCESSORS: Mapping[str, type[ImageProcessor]] = {
    one.name: one
    for one in (
        CLIPImageProcessor, Gemma3ImageProcessor, Gemma4ImageProcessor, GotOcr2ImageProcessor, Idefics3ImageProcessor,
        LlavaImageProcessor, LlavaNextImageProcessor, LlavaOnevisionImageProcessor, PixtralImageProcessor,
        Qwen2VLImageProcessor, SiglipImageProcessor, SmolVLMImageProcessor,
    )
}  # fmt: skip
# Types of models whose prompts differ from those of others with the same image processor.
_OF_MODELS: Mapping[str, type[ImageProcessor]] = {
    "aya_vision": AyaVisionImageProcessor,
    "lighton_ocr": LightOnOcrImageProcessor,
}
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# Types of models that take videos, to their processor.
VIDEO_PROCESSORS: Mapping[str, type[VideoProcessor]] = {
    **{name: Qwen2VLVideoProcessor if name in _QWEN[:2] else Qwen3VLVideoProcessor for name in _QWEN},
    "llava_onevision": LlavaOnevisionVideoProcessor,
}
# Types of models that take sound, to their processor.
SOUND_PROCESSORS: Mapping[str, type[SoundProcessor]] = {
    "gemma4": Gemma4SoundProcessor, "granite_speech": GraniteSpeechProcessor, "qwen2_5_omni": Qwen2_5OmniProcessor,
    "qwen2_5_omni_thinker": Qwen2_5OmniProcessor, "qwen2_audio": Qwen2AudioProcessor, "voxtral": VoxtralProcessor,
}  # fmt: skip
_ENDINGS = ("Fast", "Pil")
# Names of older files, for the same classes.
_OLDER_NAMES = {
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "CLIPFeatureExtractor": "CLIPImageProcessor",
    "InternVLImageProcessor": "GotOcr2ImageProcessor",
}


class Processors(NamedTuple):
    """The processor of each kind of item of a model; None for a kind that it does not take."""

    image: ImageProcessor | None = None
    video: VideoProcessor | None = None
    audio: SoundProcessor | None = None

    @property
    def pictures(self) -> ImageProcessor:
        """The processor of pictures.

        Raises:
            ProcessorConfigError: The model takes none.
        """
        if self.image is None:
            raise ProcessorConfigError("this model takes no pictures")
        return self.image


def processors(
    preprocessor: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    video_preprocessor: Mapping[str, Any] | None = None,
) -> Processors:
    """The processors that a checkpoint's files describe.

    A video has at most as many vectors as the largest picture. Without a file that could be for videos none are taken.

    Args:
        preprocessor: Contents of `preprocessor_config.json`; None where there is no such file.
        processor: Of `processor_config.json`. What is inside of it for a kind comes first.
        tokenizer: Of `tokenizer_config.json`.
        model: Of `config.json`.
        video_preprocessor: Of `video_preprocessor_config.json`.

    Raises:
        ProcessorConfigError: No supported class is named, or its options are not supported.
    """
    files = CheckpointFiles(preprocessor or {}, processor or {}, tokenizer or {}, model or {}, video_preprocessor or {})
    model_type = str(files.model.get("model_type"))
    sound = SOUND_PROCESSORS.get(model_type)
    audio = sound.of_checkpoint(files) if sound is not None and sound.is_taken(files) else None
    if audio is not None and not audio.has_images:
        return Processors(audio=audio)
    image = _image_processor(files)
    video = VIDEO_PROCESSORS.get(model_type) if files.video else None
    return Processors(image, None if video is None else video.of_checkpoint(files, image.largest().num_vectors), audio)


def image_processor(
    preprocessor: Mapping[str, Any] | None = None,
    processor: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> ImageProcessor:
    """The processor of a model with pictures alone; arguments and errors as of `processors`."""
    return _image_processor(CheckpointFiles(preprocessor or {}, processor or {}, tokenizer or {}, model or {}))


def _image_processor(files: CheckpointFiles) -> ImageProcessor:
    named = files.image.get("image_processor_type") or files.image.get("feature_extractor_type")
    if not isinstance(named, str):
        raise ProcessorConfigError("no file of this checkpoint names its image_processor_type")
    name = named
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    known = PROCESSORS.get(_OLDER_NAMES.get(name, name))
    if known is None:
        raise ProcessorConfigError(f"the image processor {named[:64]} is not supported; {', '.join(PROCESSORS)} are")
    own = _OF_MODELS.get(str(files.model.get("model_type")), known)
    return (own if issubclass(own, known) else known).from_checkpoint(files)
