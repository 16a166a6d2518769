"""Batches: pictures, conversations about them, and what stands in which patch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from drawing_training.drawing import draw_scene
from drawing_training.network import ModelConfig
from drawing_training.questions import conversation, talk
from drawing_training.scenes import COLOURS, KINDS, Scene, random_scene
from drawing_training.tokens import AROUND, ASSISTANT, END, END_ID, IMAGE, USER, WHOLE

IGNORED = -100
NUM_TURNS = 2
TALK_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of conversations.

    Attributes:
        token_ids: [rows, length]; `targets` has the same shape, with `IGNORED` where nothing is learned.
        values: Of the pictures, [pictures, 3, size, size].
        kinds: Of each patch, 0 or 1 + the place in `KINDS` of the thing whose centre it holds: [pictures, patches].
        colours: The same for `COLOURS`.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    values: torch.Tensor
    kinds: torch.Tensor
    colours: torch.Tensor


def preprocessor_config(config: ModelConfig) -> dict[str, Any]:
    """The content of preprocessor_config.json: a picture becomes one square, and is never cut."""
    size = {"longest_edge": config.image_size}
    return {
        "image_processor_type": "Idefics3ImageProcessor", "do_convert_rgb": True, "do_resize": True, "size": size,
        "resample": 1, "do_image_splitting": False, "max_image_size": size, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "do_pad": True,
    }  # fmt: skip


def prepared(picture: Image.Image, side: int) -> np.ndarray:
    """The picture as a server prepares it, [3, side, side] bytes: its longer side is shortened, then it is squared."""
    width, height = picture.size
    longer, shorter = max(width, height), min(width, height)
    rest = int(side * shorter / longer)
    rest += rest % 2
    first = (side, max(rest, 1)) if width >= height else (max(rest, 1), side)
    small = picture.resize(first, Image.Resampling.LANCZOS)
    return np.asarray(small.resize((side, side), Image.Resampling.LANCZOS)).transpose(2, 0, 1)


class Batches:
    """Batches by their number. No two draw the same picture, and none one of the held drawings."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, seed: int, num_rows: int) -> None:
        self._encode, self._config, self._seed, self._num_rows = tokenizer.encode, config, seed, num_rows

    def batch(self, number: int) -> Batch:
        """The batch with this number."""
        rows, pictures, kinds, colours = [], [], [], []
        for row in range(self._num_rows):
            draw = random.Random(f"drawing:{self._seed}:{number}:{row}")
            if draw.random() < TALK_SHARE:
                rows.append(self._row(talk(draw), has_picture=False))
                continue
            scene = random_scene(draw)
            pictures.append(prepared(draw_scene(scene, draw), self._config.image_size))
            rows.append(self._row(conversation(scene, NUM_TURNS, draw), has_picture=True))
            patches = self._patches(scene)
            kinds.append(patches[0])
            colours.append(patches[1])
        length = max(len(ids) for ids, _ in rows)
        token_ids = [ids + [END_ID] * (length - len(ids)) for ids, _ in rows]
        targets = [wanted + [IGNORED] * (length - len(wanted)) for _, wanted in rows]
        return Batch(*map(torch.tensor, (token_ids, targets)), self.values(np.stack(pictures)),
                     torch.tensor(kinds), torch.tensor(colours))  # fmt: skip

    def values(self, pictures: np.ndarray) -> torch.Tensor:
        """What the tower reads of bytes [pictures, 3, size, size]."""
        return (torch.from_numpy(pictures).float() / 255 - 0.5) / 0.5

    def _row(self, turns: list[tuple[str, str]], *, has_picture: bool) -> tuple[list[int], list[int]]:
        """Token ids and targets: each answer with the token that ends it."""
        ids: list[int] = []
        targets: list[int] = []
        for question, answer in turns:
            picture = picture_text(self._config.num_vectors) if has_picture and not ids else ""
            asked = self._encode(f"{USER}{picture}{question}{ASSISTANT}").ids
            answered = self._encode(f"{answer}{END}").ids
            # The state of a token predicts the next one.
            targets += [IGNORED] * (len(asked) - 1) + answered + [IGNORED]
            ids += asked + answered
        return ids, targets

    def _patches(self, scene: Scene) -> tuple[list[int], list[int]]:
        side = self._config.side
        kinds, colours = [0] * side**2, [0] * side**2
        for thing in scene.things:
            place = int(thing.y * side) * side + int(thing.x * side)
            kinds[place], colours[place] = 1 + KINDS.index(thing.kind), 1 + list(COLOURS).index(thing.colour)
        return kinds, colours


def picture_text(num_vectors: int) -> str:
    """What stands in a prompt for a picture."""
    return f"{AROUND}{WHOLE}{IMAGE * num_vectors}{AROUND}"
