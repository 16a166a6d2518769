"""Writes a GGUF file of random weights with the shape of Llama 1.1B, for comparisons of speed with llama.cpp.

Speed does not depend on values. Types of tensors are those that llama.cpp gives them in files of that name. It needs
the library `gguf`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY, POSITIONS = 22, 2048, 5632, 32, 4, 32000, 2048
SCALES: Mapping[str, tuple[int, ...]] = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its scales of float16."""


def has_more_bits(layer: int) -> bool:
    """Whether files of Q4_K_M have six bits for values and the last matrix of a layer."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def type_in_q4_k_m(name: str) -> str:
    """The type of a tensor in a file of Q4_K_M."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    has_six = name.endswith(("attn_v.weight", "ffn_down.weight")) and has_more_bits(layer)
    return "Q6_K" if has_six or name == "output.weight" else "Q4_K"


TYPES: Mapping[str, Callable[[str], str]] = {
    "Q8_0": lambda name: "Q8_0",
    "Q4_0": lambda name: "Q6_K" if name == "output.weight" else "Q4_0",
    "Q4_K_M": type_in_q4_k_m,
}


def shapes() -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes [outputs, inputs] of all matrices."""
    yield "token_embd.weight", (VOCABULARY, HIDDEN)
    yield "output.weight", (VOCABULARY, HIDDEN)
    width = HIDDEN // HEADS * KV_HEADS
    sizes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN),
             "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
             "ffn_down": (HIDDEN, INNER)}  # fmt: skip
    for layer in range(LAYERS):
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in sizes.items())


def random_blocks(kind: str, shape: tuple[int, int], generator: np.random.Generator) -> Any:
    """Bytes of a tensor, uint8 [outputs, bytes of a row]; the products of layers stay small."""
    num_inputs, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // num_inputs, num_bytes), dtype=np.uint8)
    for start in SCALES[kind]:
        scales = (generator.random(blocks.shape[:2]) * 2e-4).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_metadata(writer: gguf.GGUFWriter) -> None:
    """Sizes, and a tokenizer of made-up words."""
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(options.file, "llama")
    add_metadata(writer)
    norms = [f"blk.{layer}.{name}.weight" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm.weight", *norms):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    for name, shape in shapes():
        kind = TYPES[options.type](name)
        writer.add_tensor(name, random_blocks(kind, shape, generator), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
