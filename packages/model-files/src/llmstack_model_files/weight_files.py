"""Finds the files that hold a model's weights."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmstack_model_files.folder import PICKLE_SUFFIXES, ModelFilesError, artifact_path, read_json
from llmstack_model_files.mistral_form import CONSOLIDATED, linked_weights

SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
# Headers of large models are smaller.
MAX_DIGESTED_BYTES = 1 << 20
DIGESTED_PIECE_BYTES = 1 << 26
INDEX_NAME = "model.safetensors.index.json"


def safetensors_files(folder: Path) -> list[Path]:
    """Real paths of the safetensors files of a model: the single file, the shards of the index, or the only one.

    Raises:
        ModelFilesError: There are none (only files that can carry code, perhaps), or a shard is missing.
    """
    if linked := linked_weights(folder):
        return linked
    single = artifact_path(folder, SINGLE_NAME)
    if single is not None:
        return [single]
    index = read_json(folder, INDEX_NAME, required=False)
    if index is not None:
        return _shards(folder, index.get("weight_map"))
    others = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    if len(others) == 1 and not others[0].startswith(CONSOLIDATED):
        only = artifact_path(folder, others[0])
        return [only] if only is not None else []
    raise ModelFilesError(_why_none(Path(folder), others))


def weights_digest(folder: Path, *, of_content: bool = False, of_place: bool = False) -> str:
    """Digest of sizes, times and headers of the weight files. A changed digest means that weights may have changed.

    Empty where there are no weight files.

    `of_content`: Reads everything, `config.json` too, which takes about as long as loading. The digest is then equal on
    two hosts that have the same model.
    `of_place`: Also where the files lie: device and inode.
    """
    paths = sorted(path for suffix in WEIGHT_SUFFIXES for path in Path(folder).glob(f"*{suffix}") if path.is_file())
    if of_content and paths:
        return _content_digest([path for path in (Path(folder) / "config.json",) if path.is_file()] + paths)
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            digest.update(file.read(MAX_DIGESTED_BYTES))
            if of_place:
                digest.update(f"\0{status.st_dev}\0{status.st_ino}".encode())
    return digest.hexdigest() if paths else ""


def _content_digest(paths: list[Path]) -> str:
    pieces = [(path, start) for path in paths for start in range(0, max(path.stat().st_size, 1), DIGESTED_PIECE_BYTES)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        for (path, start), piece in zip(pieces, pool.map(_piece_digest, pieces), strict=True):
            digest.update(f"{path.name}\0{start}\0".encode() + piece)
    return digest.hexdigest()[:32]


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    digest, end = hashlib.sha256(), start + DIGESTED_PIECE_BYTES
    with path.open("rb") as file:
        while start < end:
            file.seek(start)
            chunk = file.read(min(1 << 20, end - start))
            if not chunk:
                break
            digest.update(chunk)  # without the interpreter's lock
            start += len(chunk)
    return digest.digest()


def _shards(folder: Path, weight_map: object) -> list[Path]:
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFilesError(f"{INDEX_NAME} has no weight_map of file names.")
    paths: list[Path] = []
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors"):
            raise ModelFilesError(f"{INDEX_NAME} names {name[:64]!r}, which is no safetensors file.")
        path = artifact_path(folder, name)
        if path is None:
            raise ModelFilesError(f"{INDEX_NAME} names {name[:64]}, which is missing.")
        paths.append(path)
    if not paths:
        raise ModelFilesError(f"{INDEX_NAME} names no files.")
    return paths


def _why_none(folder: Path, others: list[str]) -> str:
    if others:
        return f"{folder.name} has several safetensors files but neither {SINGLE_NAME} nor {INDEX_NAME}."
    if not folder.is_dir():
        return f"{folder.name} is no folder."
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder.name} has its weights only as {pickles[0][:64]}, a format that can run code; "
            f"convert them to safetensors."
        )
    return f"{folder.name} has no safetensors weights (--load-format dummy needs none)."
