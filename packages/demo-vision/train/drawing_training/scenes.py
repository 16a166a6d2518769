"""What a picture shows: a few coloured shapes, a digit, a letter, or nothing."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

COLOURS = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 30),
    "green": (30, 160, 60),
    "blue": (35, 80, 215),
    "purple": (135, 45, 165),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
DIGITS = tuple(string.digits)
LETTERS = tuple(string.ascii_uppercase)
KINDS = (*SHAPES, *DIGITS, *LETTERS)
MAX_OBJECTS = 3


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape, a digit or a letter. Its centre and radius are fractions of the picture's sides and shorter side."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    degrees: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """The things of a picture. `groups`: How often each colour and kind occurs, in the order of answers."""

    things: tuple[Thing, ...]
    groups: tuple[tuple[str, str, int], ...]

    @property
    def is_symbol(self) -> bool:
        """Whether it shows a digit or a letter alone."""
        return len(self.things) == 1 and self.things[0].kind not in SHAPES


def random_scene(draw: random.Random) -> Scene:
    """Shapes in 64 of 100 pictures, a digit in 15, a letter in 20, and nothing in one."""
    share = draw.random()
    if share < 0.64:
        return _shapes(draw)
    if share < 0.79:
        return _symbol(draw, draw.choice(DIGITS))
    if share < 0.99:
        return _symbol(draw, draw.choice(LETTERS))
    return Scene((), ())


def _symbol(draw: random.Random, kind: str) -> Scene:
    colour, radius = draw.choice(list(COLOURS)), draw.uniform(0.25, 0.42)
    x, y = (draw.uniform(radius + 0.05, 0.95 - radius) for _ in range(2))
    thing = Thing(kind, colour, x, y, radius, draw.uniform(-8, 8))
    return Scene((thing,), ((colour, kind, 1),))


def _shapes(draw: random.Random) -> Scene:
    every = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    groups = draw.sample(every, draw.choices((1, 2, 3), (5, 4, 1))[0])
    counts = [draw.choices((1, 2, 3), (6, 4, 3))[0] for _ in groups]
    while sum(counts) > MAX_OBJECTS:
        counts[counts.index(max(counts))] -= 1
    wanted = [group for group, count in zip(groups, counts, strict=True) for _ in range(count)]
    largest = min(0.25, 0.38 / math.sqrt(len(wanted)))
    placed: list[tuple[float, float, float]] = []
    while len(placed) < len(wanted):
        radius = draw.uniform(0.115, max(largest, 0.135))
        x, y = (draw.uniform(radius + 0.02, 0.98 - radius) for _ in range(2))
        if all(math.dist((x, y), other[:2]) > 1.12 * (radius + other[2]) for other in placed):
            placed.append((x, y, radius))
        else:
            largest *= 0.995  # a crowded picture is filled up with smaller things
    things = [
        Thing(shape, colour, x, y, radius, draw.uniform(-10, 10))
        for (colour, shape), (x, y, radius) in zip(wanted, placed, strict=True)
    ]
    named = sorted(((colour, shape, count) for (colour, shape), count in zip(groups, counts, strict=True)), key=_place)
    return Scene(tuple(things), tuple(named))


def _place(group: tuple[str, str, int]) -> tuple[int, int]:
    """Answers name shapes in this order, and one shape's colours in that of the table."""
    return SHAPES.index(group[1]), list(COLOURS).index(group[0])
