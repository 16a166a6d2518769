"""Pictures as arrays of RGB."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmstack_media.decode.headers import ImageHeader, checked_header, opened
from llmstack_media.decode.pixels import WHITE, Color, as_shown, to_rgb
from llmstack_media.errors import invalid_image
from llmstack_media.limits import MediaLimits

Pixels = NDArray[np.uint8]
"""[height, width, 3]"""


def decode_image(data: bytes, limits: MediaLimits, background: Color = WHITE) -> Pixels:
    """The first frame of a picture as it is shown: turned, in RGB, transparent parts on `background`.

    Raises:
        InvalidRequestError: It cannot be read, or exceeds a limit, which the header says before a pixel is decoded.
    """
    with opened(data) as image:
        return pixels_of(image, checked_header(image, data, limits), background)


def pixels_of(image: Image.Image, header: ImageHeader, background: Color) -> Pixels:
    """The current frame of an opened picture, as `decode_image` gives it."""
    image.load()
    pixels = np.asarray(as_shown(to_rgb(image, background), header.orientation))
    if pixels.shape != (header.height, header.width, 3):  # a file whose parts disagree
        raise invalid_image("cannot be read: its size is not what its header says")
    return pixels
