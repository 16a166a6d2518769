"""GGUF files of small random models, written with the format's own library, and the weights that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

# Where a block has its float16 scales.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
TYPES = (*_SCALES, "F32", "F16", "BF16")
SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "inner": 512, "layers": 2, "vocab": 300, "positions": 64}


def random_data(kind: str, shape: tuple[int, int], seed: int, scale: float = 0.002) -> np.ndarray:
    """Bytes of a tensor with random numbers: [rows, bytes of a row]."""
    generator = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if block_size == 1:
        values = generator.standard_normal(shape, dtype=np.float32) * 20 * scale
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(shape[0], -1)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8)
    for start in _SCALES[kind]:
        scales = (generator.random(blocks.shape[:2]) * scale * (0.05 if kind.endswith("_K") else 1)).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def meaning(data: np.ndarray, kind: str) -> torch.Tensor:
    """What the library says that the bytes mean, in float32."""
    given = data.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    return torch.from_numpy(gguf.quants.dequantize(given, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def write_model(
    path: Path, architecture: str, kind_of: Callable[[str], str], *, is_tied: bool = False, has_tokenizer: bool = True
) -> dict[str, torch.Tensor]:
    """Writes a file; the tensors that it means, by their names in it."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer)
    if has_tokenizer:
        add_tokenizer(writer)
    meant: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(_shapes(architecture, is_tied).items()):
        if len(shape) == 1:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
            meant[name] = values + 1 if "norm" in name else values
            writer.add_tensor(name, meant[name].numpy())
            continue
        kind = kind_of(name)
        data = random_data(kind, (shape[0], shape[1]), seed)
        meant[name] = meaning(data, kind)
        raw = data.view(np.float32) if kind == "F32" else data.view(np.float16) if kind == "F16" else data
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_tokenizer(writer: Any) -> None:
    """A byte-level tokenizer without merges, and two special tokens."""
    letters = list(gguf_bytes()) + [f"<extra_{index}>" for index in range(SIZES["vocab"] - 258)]
    tokens = ["<s>", "</s>", *letters]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * len(letters)])
    writer.add_token_merges(["a b"] if "ab" in tokens else [])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def gguf_bytes() -> list[str]:
    """The characters that byte-level tokenizers write bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _add_metadata(writer: Any) -> None:
    writer.add_context_length(SIZES["positions"])
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(SIZES["inner"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)


def _shapes(architecture: str, is_tied: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = SIZES["hidden"], SIZES["inner"], SIZES["hidden"] // SIZES["heads"]
    kv_size = SIZES["kv_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (SIZES["vocab"], hidden)}
    for index in range(SIZES["layers"]):
        layer = {
            "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn_q.weight": (hidden, hidden),
            "attn_k.weight": (kv_size, hidden), "attn_v.weight": (kv_size, hidden),
            "attn_output.weight": (hidden, hidden), "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden), "ffn_down.weight": (hidden, inner),
        }  # fmt: skip
        if architecture == "qwen2":
            layer |= {"attn_q.bias": (hidden,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
        if architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    return shapes if is_tied else shapes | {"output.weight": (SIZES["vocab"], hidden)}
