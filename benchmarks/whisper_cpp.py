"""Writes a Whisper checkpoint in the form that whisper.cpp reads, to compare with equal weights.

python benchmarks/whisper_cpp.py MODEL FILE.bin

`MODEL` is a folder in the form of transformers. Matrices are written in float16, as whisper.cpp's own files have them;
biases, norms and positions in float32. The form is that of its `models/README.md`: sizes, mel filters, tokens, tensors.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MAGIC = 0x67676D6C
_FLOAT32, _FLOAT16 = 0, 1
_NUM_FREQUENCIES = 201
_RENAMED = (
    ("model.", ""), ("layers", "blocks"), ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"), ("final_layer_norm", "mlp_ln"), ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"), ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"),
    ("fc1", "mlp.0"), ("fc2", "mlp.2"), ("decoder.embed_tokens", "decoder.token_embedding"),
    ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln"),
    ("embed_positions.weight", "positional_embedding"),
)  # fmt: skip
"""Parts of transformers' names, in this order, and of OpenAI's, which the file has."""


def write_model(folder: Path, path: Path) -> None:
    """Writes the checkpoint in `folder` as the file `path`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    with path.open("wb") as file:
        _write_integers(file, _MAGIC, *_sizes(config), _FLOAT16)
        filters = WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).mel_filters
        _write_integers(file, config["num_mel_bins"], _NUM_FREQUENCIES)
        file.write(np.ascontiguousarray(np.asarray(filters).T, dtype=np.float32).tobytes())
        tokens = _plain_tokens(folder)
        _write_integers(file, len(tokens))
        for token in tokens:
            _write_integers(file, len(token))
            file.write(token)
        for name, tensor in tensors.items():
            if not name.startswith("proj_out"):
                _write_tensor(file, _renamed(name), tensor)


def _sizes(config: dict[str, int]) -> list[int]:
    names = [
        "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
        "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins",
    ]  # fmt: skip
    return [config[name] for name in names]


def _plain_tokens(folder: Path) -> list[bytes]:
    """Bytes of the tokens before the special ones, which whisper.cpp names itself."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    to_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = {token["content"] for token in described["added_tokens"]}
    vocabulary = sorted(described["model"]["vocab"].items(), key=lambda entry: entry[1])
    return [bytes(to_byte[letter] for letter in text) for text, _ in vocabulary if text not in special]


def _renamed(name: str) -> str:
    for ours, theirs in _RENAMED:
        name = name.replace(ours, theirs)
    return name


def _write_tensor(file: BinaryIO, name: str, tensor: torch.Tensor) -> None:
    is_matrix = tensor.ndim >= 2 and not name.endswith("positional_embedding")
    if name.startswith("encoder.conv") and name.endswith("bias"):
        tensor = tensor[:, None]
    encoded = name.encode()
    _write_integers(file, tensor.ndim, len(encoded), _FLOAT16 if is_matrix else _FLOAT32, *reversed(tensor.shape))
    file.write(encoded)
    file.write(tensor.to(torch.float16 if is_matrix else torch.float32).contiguous().numpy().tobytes())


def _write_integers(file: BinaryIO, *values: int) -> None:
    file.write(struct.pack(f"<{len(values)}i", *values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.model, arguments.file)
