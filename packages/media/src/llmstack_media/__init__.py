"""Pictures and sounds in; what encoders read, and placeholders, out."""

from llmstack_media.decode.clips import Clip, decode_frames, join_frames, read_clip
from llmstack_media.decode.headers import ImageHeader, read_header
from llmstack_media.decode.pictures import decode_image
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.limits import MediaLimits
from llmstack_media.processors.checkpoints import Processors, image_processor, processors
from llmstack_media.processors.layout import ImageLayout, Piece, VideoLayout, text_of
from llmstack_media.processors.llava_next import LlavaNextImageProcessor
from llmstack_media.processors.processor import ImageProcessor, ItemProcessor, PixelProcessor
from llmstack_media.processors.sound import SoundProcessor
from llmstack_media.processors.video import VideoProcessor

__all__ = [
    "Clip",
    "ImageHeader",
    "ImageLayout",
    "ImageProcessor",
    "ItemProcessor",
    "LlavaNextImageProcessor",
    "MediaLimits",
    "Piece",
    "PixelProcessor",
    "ProcessorConfigError",
    "Processors",
    "SoundProcessor",
    "VideoLayout",
    "VideoProcessor",
    "decode_frames",
    "decode_image",
    "image_processor",
    "join_frames",
    "processors",
    "read_clip",
    "read_header",
    "text_of",
]
