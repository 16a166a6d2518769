"""Small model files, and installed distributions that have some."""

from __future__ import annotations

import struct
from pathlib import Path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def integer(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def write_model(path: Path) -> Path:
    """A file with a configuration and no weights but one."""
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("qwen2")]
    keys += [integer(f"qwen2.{name}", 8) for name in sizes]
    keys.append(text("qwen2.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 1, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensor
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(32))
    return path


def install_models(folder: Path, **models: str) -> None:
    """The metadata of an installed distribution that registers models, as pip leaves it in a folder of `sys.path`."""
    metadata = folder / "their_models-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-models\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in models.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[llmstack.models]", *lines]))
