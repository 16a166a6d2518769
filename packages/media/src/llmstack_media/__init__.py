"""Pictures in; patches, placeholders and their counts out."""

from llmstack_media.decode.headers import ImageHeader, read_header
from llmstack_media.decode.pictures import Animation, decode_animation, decode_image
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.limits import MediaLimits
from llmstack_media.processors.checkpoints import image_processor
from llmstack_media.processors.layout import ImageLayout, Piece, text_of
from llmstack_media.processors.llava_next import LlavaNextImageProcessor
from llmstack_media.processors.processor import ImageProcessor

__all__ = [
    "Animation",
    "ImageHeader",
    "ImageLayout",
    "ImageProcessor",
    "LlavaNextImageProcessor",
    "MediaLimits",
    "Piece",
    "ProcessorConfigError",
    "decode_animation",
    "decode_image",
    "image_processor",
    "read_header",
    "text_of",
]
