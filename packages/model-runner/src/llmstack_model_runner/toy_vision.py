"""Test kit: a tiny Llama with a toy encoder of bytes, which no table names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmstack_model_runner.layers.weight_slot import WeightSlot, unread
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.llama import Llama
from llmstack_types import MediaItem, MediaMemory
from llmstack_types.vocabulary import MediaKind

ARCHITECTURE = "ToyVisionForConditionalGeneration"
PATCH = 4
"""Bytes of one unit, which becomes one vector."""
_NUM_LAYERS = 3
_LLAMA: Mapping[str, object] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip


class ToyEncoder:
    """A linear layer over patches of bytes, and layers whose every vector depends on the whole item."""

    def __init__(self, size: int, dtype: torch.dtype, *, is_atomic: bool, max_num_tokens: int) -> None:
        self.is_atomic, self.num_deep, self.slice_units, self.num_weights = is_atomic, 0, 0, 0
        self.num_layers: Mapping[MediaKind, int] = {"image": _NUM_LAYERS}
        self.max_num_tokens: Mapping[MediaKind, int] = {"image": max_num_tokens}
        self.work_bytes = 3 * max_num_tokens * size * dtype.itemsize
        self._dtype = dtype
        self._weights: dict[str, torch.Tensor] = {}
        shapes = {"embed": (size, PATCH), **{f"layers.{layer}": (size, size) for layer in range(_NUM_LAYERS)}}
        self._shapes: Mapping[str, tuple[int, ...]] = shapes

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors."""

        def loads(name: str) -> WeightSlot:
            return WeightSlot(self._shapes[name], lambda tensor: self._load(name, tensor))

        return {f"vision.{name}.weight": loads(name) for name in self._shapes}

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        self._weights[name] = tensor.to(self._dtype, copy=True)

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        """None: places are positions."""
        return None

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The patches as vectors: [num_units, hidden_size]."""
        if len(data) != item.num_units * PATCH:
            raise ValueError(f"{len(data)} bytes are not {item.num_units} patches")
        pixels = torch.frombuffer(data, dtype=torch.uint8).view(-1, PATCH)
        return (torch.nn.functional.linear(pixels.to(self._dtype) / 255, self._weights["embed"]),)

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The state after some further layers."""
        (hidden,) = state
        for layer in range(first, first + count):
            mixed = torch.nn.functional.linear(hidden, self._weights[f"layers.{layer}"])
            hidden = hidden + torch.tanh(mixed) - hidden.mean(0)
        return (hidden,)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors after the last layer."""
        return state[0]


class ToyVision(Llama):
    """A Llama whose prompts may have items of bytes, each of `PATCH` bytes per place."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        vision = config["vision_config"]
        self._encoder = ToyEncoder(
            read_int(config, "hidden_size"), dtype, is_atomic=read_bool(vision, "is_atomic", False),
            max_num_tokens=read_int(vision, "max_num_tokens"),
        )  # fmt: skip

    def media_encoder(self) -> ToyEncoder:
        return self._encoder

    def slots(self) -> dict[str, WeightSlot]:
        own = self._encoder.slots()
        return super().slots() | (own if self._sharding.is_first_stage else unread(own))


def write_toy_vision(folder: Path, *, seed: int = 0, is_atomic: bool = False, **overrides: object) -> Path:
    """Writes a checkpoint with random weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vision = {"is_atomic": is_atomic, "max_num_tokens": 24}
    config = {**_LLAMA, "architectures": [ARCHITECTURE], "vision_config": vision, **overrides}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, slot in ToyVision(config, torch.float32, torch.device("cpu")).slots().items():
        values = torch.randn(slot.shape, generator=generator)
        weights[name] = values * 0.02 + 1 if len(slot.shape) == 1 else values * 0.3
    save_file(weights, folder / "model.safetensors")
    return folder


def register_toy_vision(folder: Path) -> Path:
    """Writes the metadata of a package that adds the architecture; the folder belongs into `sys.path`."""
    metadata = folder / "toy_vision-0.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-vision\nVersion: 0.0\n", encoding="utf-8")
    line = f"{ARCHITECTURE} = {__name__}:{ToyVision.__name__}"
    (metadata / "entry_points.txt").write_text(f"[llmstack.architectures]\n{line}\n", encoding="utf-8")
    return folder


def toy_item(data: bytes, offset: int, *, num_breaks: int = 0, path: str = "") -> MediaItem:
    """An item of these bytes; `num_breaks` places in its middle have no vector.

    `path`: The file that has the bytes; without it they are in the item.
    """
    num_vectors = len(data) // PATCH
    half = num_vectors // 2
    runs = ((0, half), (half + num_breaks, num_vectors - half)) if num_breaks else ()
    memory = MediaMemory(len(data), path=path) if path else MediaMemory(len(data), data=data)
    digest = hashlib.sha256(b"toy" + data).digest()
    return MediaItem(digest, "image", offset, num_vectors + num_breaks, runs, (num_vectors,), num_vectors, memory)


def toy_vectors(folder: Path, data: bytes) -> torch.Tensor:
    """The encoder's vectors for these bytes, in float32, by plain products: [num_vectors, hidden_size]."""
    weights = load_file(folder / "model.safetensors")
    hidden = torch.tensor(list(data)).view(-1, PATCH).float() / 255 @ weights["vision.embed.weight"].T
    for layer in range(_NUM_LAYERS):
        hidden = hidden + torch.tanh(hidden @ weights[f"vision.layers.{layer}.weight"].T) - hidden.mean(0)
    return hidden


def given_item(vectors: torch.Tensor, offset: int) -> MediaItem:
    """An item of the kind `embeds`."""
    data = vectors.contiguous().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(b"given" + data).digest()
    return MediaItem(digest, "embeds", offset, len(vectors), memory=MediaMemory(len(data), data=data))


def places_of(items: Sequence[MediaItem]) -> list[int]:
    """The places in a prompt that have vectors of the items, ascending."""
    return [
        item.offset + run_start + place
        for item in items
        for run_start, length in item.embed_runs or ((0, item.num_tokens),)
        for place in range(length)
    ]
