"""Draws scenes with Pillow, in sizes and tints that vary."""

from __future__ import annotations

import math
import random
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from drawing_training.scenes import COLOURS, SHAPES, Scene, Thing

# The font that Pillow contains, so that every machine draws the same letters.
_FONT_SIZE = 200


@cache
def _font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(_FONT_SIZE)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow was built without FreeType, so it cannot draw letters of this size")
    return font


def draw_scene(scene: Scene, draw: random.Random) -> Image.Image:
    """The picture of a scene, with sides of 96 to 288 pixels, on a light ground."""
    short = draw.randint(96, 256)
    size = (short, short) if draw.random() < 0.7 else (short, int(short * draw.uniform(1.0, 1.25)))
    size = size if draw.random() < 0.5 else size[::-1]
    ground = (255, 255, 255) if draw.random() < 0.5 else tuple(draw.randint(205, 255) for _ in range(3))
    image = Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(image)
    tints: dict[str, tuple[int, ...]] = {}
    for thing in scene.things:
        if thing.colour not in tints:  # one tint a picture, so that things of a colour look alike
            tints[thing.colour] = tuple(
                min(255, max(0, part + draw.randint(-18, 18))) for part in COLOURS[thing.colour]
            )
        if thing.kind in SHAPES:
            _draw_shape(pen, size, thing, tints[thing.colour])
        else:
            _draw_symbol(image, thing, tints[thing.colour], draw.randint(0, 12))
    return image


def _draw_shape(pen: ImageDraw.ImageDraw, size: tuple[int, int], thing: Thing, tint: tuple[int, ...]) -> None:
    x, y, radius = thing.x * size[0], thing.y * size[1], thing.radius * min(size)
    if thing.kind == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tint)
        return
    turn = math.radians(thing.degrees)
    cosine, sine = math.cos(turn), math.sin(turn)
    outline = [
        (x + radius * (cosine * right - sine * down), y + radius * (sine * right + cosine * down))
        for right, down in _outline(thing.kind)
    ]
    pen.polygon(outline, fill=tint)


@cache
def _outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corners of a shape within the unit circle, to the right and down."""
    if shape == "square":
        return ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
    if shape == "triangle":
        return ((0.0, -1.0), (0.95, 0.75), (-0.95, 0.75))
    if shape == "star":
        angles = [math.pi * corner / 5 - math.pi / 2 for corner in range(10)]
        return tuple(
            (length * math.cos(angle), length * math.sin(angle))
            for angle, length in zip(angles, (1.05, 0.42) * 5, strict=True)
        )
    if shape == "cross":
        thin, long = 0.3, 0.95
        return (
            (-thin, -long), (thin, -long), (thin, -thin), (long, -thin), (long, thin), (thin, thin),
            (thin, long), (-thin, long), (-thin, thin), (-long, thin), (-long, -thin), (-thin, -thin),
        )  # fmt: skip
    steps = [2 * math.pi * step / 40 for step in range(40)]  # the heart curve
    return tuple(
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16 - 0.1,
        )
        for t in steps
    )


def _draw_symbol(image: Image.Image, thing: Thing, tint: tuple[int, ...], stroke: int) -> None:
    """A letter or digit whose longer side is twice the radius; `stroke` makes it bold."""
    font = _font()
    left, top, right, bottom = font.getbbox(thing.kind, stroke_width=stroke)
    mask = Image.new("L", (int(right - left) + 1, int(bottom - top) + 1), 0)
    ImageDraw.Draw(mask).text((-left, -top), thing.kind, fill=255, font=font, stroke_width=stroke)
    mask = mask.rotate(-thing.degrees, expand=True, resample=Image.Resampling.BILINEAR)
    scale = 2 * thing.radius * min(image.size) / max(mask.size)
    mask = mask.resize((max(1, round(mask.width * scale)), max(1, round(mask.height * scale))))
    corner = (round(thing.x * image.width - mask.width / 2), round(thing.y * image.height - mask.height / 2))
    image.paste(Image.new("RGB", mask.size, tint), corner, mask)
