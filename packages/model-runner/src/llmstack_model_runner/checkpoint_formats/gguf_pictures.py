"""Encoders of pictures in GGUF files, with names and forms of repositories.

Their matrices are widened where they are quantized: encoders keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_gguf import Header, PictureTensor, picture_tensors
from llmstack_model_runner.checkpoint_formats.head_rows import halves_of_heads
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight

Read = Callable[[str], torch.Tensor]
"""Reads a tensor of the file, in full precision."""


def read_pictures(header: Header, read: Read) -> Iterator[tuple[str, UnreadWeight]]:
    """The tensors of an encoder.

    Raises:
        llmstack_gguf.GGUFError: The encoder is not supported.
    """
    heads = header.metadata.get("clip.vision.attention.head_count")
    num_heads = heads if isinstance(heads, int) else 0
    for target in picture_tensors(header):
        yield target.name, UnreadWeight(partial(_in_form, target, read, num_heads))


def _in_form(target: PictureTensor, read: Read, num_heads: int) -> torch.Tensor:
    parts = [read(name) for name in target.sources]
    if target.form in ("rows", "frames") and any(part.shape != parts[0].shape for part in parts):
        raise ValueError(f"{', '.join(target.sources)} are not of one shape.")
    match target.form:
        case "rows":
            return torch.cat(parts)
        case "frames":
            return torch.stack(parts, 2)
        case "less one":
            return parts[0].float() - 1
        case "vector":
            return parts[0].reshape(1, 1, -1)
        case "vectors":
            return parts[0].reshape(1, -1, parts[0].shape[-1])
        case "pairs":
            return parts[0][halves_of_heads(len(parts[0]), num_heads, target.sources[0])]
        case _:
            return parts[0]
