"""A cache of packed weights in files, so that they are packed once.

A file has a header in JSON, which bounds all else, and the tensors at multiples of 64 bytes. It holds no code, is read
into memory of the process, and lies in a folder that only its owner may enter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from llmstack_kernels.linear import PackedLinear, PackedWeight, packed_weight, packing_version
from llmstack_kernels.native.huge_pages import empty_in_huge_pages
from llmstack_model_files import weights_digest
from llmstack_types import ModelRunnerConfig

logger = logging.getLogger(__name__)

MAGIC = b"LLMSPK01"
"""Changes with the format, and with the order in which layers put rows together."""
PREFIX_BYTES = 32
"""Magic, length and digest of the header."""
MAX_HEADER_BYTES = 1 << 24
MAX_CACHE_BYTES = 32 << 30
# Less is packed within a tenth of a second.
MIN_BYTES = 64 << 20
MIN_FREE_BYTES = 2 << 30
ALIGNMENT = 64
PIECE_BYTES = 1 << 24
LOWEST_PRIORITY = 19
LEFTOVER_S = 3600.0
# The rest of the start and the first requests go first.
WRITE_DELAY_S = 3.0
_SUFFIX = ".packed"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32,
)}  # fmt: skip


def cache_folder() -> Path:
    """Where files are kept: `llmstack/packed` in `XDG_CACHE_HOME`, `~/.cache` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "llmstack" / "packed"


@contextlib.contextmanager
def packed_weights(
    config: ModelRunnerConfig, model_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Iterator[PackCache | None]:
    """The cache of a model's packed weights, while they are loaded; what was packed then is written.

    None where it is off, or where no weights are packed that can be kept: those of a GPU, and of one of several ranks.
    """
    has_ranks = config.tensor_parallel_size * config.pipeline_parallel_size > 1
    version = packing_version(device.type) if device.type == "cpu" else ""
    is_excluded = has_ranks or config.load_format == "dummy"
    # A user without a home has no folder of their own.
    if not config.pack_cache or not version or is_excluded or not cache_folder().is_absolute():
        yield None
        return

    def identity() -> str:
        parts = {
            "version": version, "files": weights_digest(Path(config.model_path), of_place=True), "dtype": str(dtype),
            "quantization": config.quantization, "config": model_config, "model_impl": config.model_impl,
            "is_batch_invariant": config.enable_deterministic_inference,
        }  # fmt: skip
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    before = identity()
    cache = PackCache(before, cache_folder())
    try:
        yield cache
        cache.finish(is_current=identity() == before)
    finally:
        cache.close()


class PackCache:
    """The packed weights of one model: those of a file, and those that are to become one.

    It never fails a start: what cannot be read is packed again, and what cannot be written is not kept.
    """

    def __init__(self, identity: str, folder: Path) -> None:
        """`identity`: Digest of all that packed weights depend on: files, configuration, data type and kernels."""
        self._folder = folder
        self._path = folder / f"{identity}{_SUFFIX}"
        self._entries: Mapping[str, Any] = {}
        self._file: BinaryIO | None = None
        self._kept: dict[str, PackedWeight] = {}
        try:
            self._open()
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("packed weights %s are not used: %s", self._path, error)
            self.close()

    @property
    def is_hit(self) -> bool:
        """Whether there are packed weights of this model."""
        return self._file is not None

    def has(self, name: str, shape: tuple[int, int]) -> bool:
        """Whether a layer of this name and shape [out_features, in_features] was packed."""
        entry = self._entries.get(name)
        return entry is not None and tuple(entry["shape"]) == shape

    def read(self, name: str) -> PackedWeight:
        """The packed weight of a layer that it has.

        Raises:
            ValueError: The file cannot be read; it is removed, so that the next start packs again.
        """
        entry = self._entries[name]
        try:
            tensors = tuple(self._read_tensor(described) for described in entry["tensors"])
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise ValueError(f"{self._path}: packed weights cannot be read ({error}); start again") from error
        shape = (int(entry["shape"][0]), int(entry["shape"][1]))
        return PackedWeight(shape, _DTYPES[entry["dtype"]], str(entry["scheme"]), int(entry["group_size"]), tensors)

    def keep(self, name: str, packed: PackedLinear) -> None:
        """Notes a layer that was packed in this start."""
        weight = packed_weight(packed)
        if weight is not None:
            self._kept[name] = weight

    def finish(self, *, is_current: bool) -> threading.Thread | None:
        """Writes what was packed, in a thread that this process does not wait for.

        `is_current`: Whether the files of the model are still those of `identity`.
        """
        was_hit = self.is_hit
        self.close()
        kept, self._kept = self._kept, {}
        num_bytes = sum(tensor.nbytes for weight in kept.values() for tensor in weight.tensors)
        if was_hit or not is_current or not MIN_BYTES <= num_bytes <= MAX_CACHE_BYTES:
            return None
        writing = threading.Thread(target=self._write, args=(kept, num_bytes), name="pack-cache", daemon=True)
        writing.start()
        return writing

    def _open(self) -> None:
        check_own(os.stat(self._folder, follow_symlinks=False), self._folder)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - open while layers are read
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("the file belongs to another user")
        start = self._file.read(PREFIX_BYTES)
        header_bytes = int.from_bytes(start[8:16], "little")
        if start[:8] != MAGIC or len(start) != PREFIX_BYTES or header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the format is another one")
        text = self._file.read(header_bytes)
        if _digest(text) != start[16:]:
            raise ValueError("the header is damaged")
        header = json.loads(text)
        entries = header["entries"]
        for entry in entries.values():
            check_entry(entry, status.st_size)
        if header["num_bytes"] != status.st_size:
            raise ValueError("the file is not complete")
        os.utime(self._path)  # used last
        self._entries = entries

    def close(self) -> None:
        """Closes the file; nothing can be read then."""
        self._entries = {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_tensor(self, described: Mapping[str, Any]) -> torch.Tensor:
        if self._file is None:
            raise ValueError("the packed weights are closed")
        shape, dtype = tuple(described["shape"]), _DTYPES[described["dtype"]]
        tensor = empty_in_huge_pages(num_elements(shape), dtype)
        memory = tensor.view(torch.uint8).numpy().data
        self._file.seek(described["offset"])
        while memory:
            num_read = self._file.readinto(memory)  # type: ignore[attr-defined]  # it is not buffered
            if not num_read:
                raise OSError("the file has become shorter")
            memory = memory[num_read:]
        return tensor.view(shape)

    def _write(self, kept: Mapping[str, PackedWeight], num_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)  # of this thread
        time.sleep(WRITE_DELAY_S)
        try:
            make_own_folder(self._folder)
            make_room(self._folder, num_bytes)
            free_bytes = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
            if free_bytes < num_bytes + MIN_FREE_BYTES:
                logger.info("packed weights are not kept: %s has %d bytes free", self._folder, free_bytes)
                return
            write_file(self._path, kept)
            logger.info("packed weights are kept for the next start: %d MiB in %s", num_bytes >> 20, self._path)
        except BlockingIOError:
            logger.debug("another process writes %s", self._path)
        except (OSError, ValueError) as error:
            logger.warning("packed weights are not kept: %s", error)


def check_entry(entry: Mapping[str, Any], file_bytes: int) -> None:
    """Raises ValueError, KeyError or TypeError for a layer whose tensors do not lie in the file."""
    if len(entry["shape"]) != 2 or entry["dtype"] not in _DTYPES or not isinstance(entry["group_size"], int):
        raise ValueError("a layer is described wrongly")
    for described in entry["tensors"]:
        num_bytes = num_elements(described["shape"]) * _DTYPES[described["dtype"]].itemsize
        if not 0 <= described["offset"] <= file_bytes - num_bytes:
            raise ValueError("a tensor does not lie in the file")


def num_elements(shape: Any) -> int:
    """Numbers of a tensor; ValueError for a negative size."""
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise ValueError("a size is no natural number")
        count *= size
    return count


def check_own(status: os.stat_result, folder: Path) -> None:
    """Raises ValueError unless it is a folder of this user that no other one may enter."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{folder} is no folder that only this user may enter (mode 0700)")


def make_own_folder(folder: Path) -> None:
    """Makes the folder where it is missing, and checks that it is our own."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own(os.stat(folder, follow_symlinks=False), folder)


def make_room(folder: Path, num_bytes: int) -> None:
    """Removes what was used least recently, until so many bytes more fit the limit; and what others did not finish."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed by another process
            status = path.lstat()
            if path.name.startswith(".") and time.time() - status.st_mtime > LEFTOVER_S:
                path.unlink()
            elif path.name.endswith(_SUFFIX):
                files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total + num_bytes <= MAX_CACHE_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size


def write_file(path: Path, kept: Mapping[str, PackedWeight]) -> None:
    """Writes a file beside the others and renames it, once it is on the disk.

    Raises:
        BlockingIOError: Another process writes it, or has written it.
    """
    entries, offset = {}, 0
    for name, weight in kept.items():
        tensors = []
        for tensor in weight.tensors:
            described = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            tensors.append({**described, "offset": offset})
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        entries[name] = {
            "shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch."), "scheme": weight.scheme,
            "group_size": weight.group_size, "tensors": tensors,
        }  # fmt: skip
    header = _header(entries, offset)
    made = path.with_name(f".{path.name}")
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not made.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(made)):
            raise BlockingIOError("another process was first")
        file.truncate(0)
        file.write(MAGIC + len(header).to_bytes(8, "little") + _digest(header) + header)
        for piece in _pieces(kept):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())  # after a loss of power the name must not be there without the content
        os.rename(made, path)


def _header(entries: dict[str, dict[str, Any]], num_data_bytes: int) -> bytes:
    """The header with offsets from the start of the file, padded to the alignment."""
    room = len(json.dumps(entries)) + 64 * sum(len(entry["tensors"]) for entry in entries.values()) + 1024
    start = -(-(PREFIX_BYTES + room) // ALIGNMENT) * ALIGNMENT
    for entry in entries.values():
        for described in entry["tensors"]:
            described["offset"] += start
    text = json.dumps({"num_bytes": start + num_data_bytes, "entries": entries}).encode()
    if start > MAX_HEADER_BYTES:
        raise ValueError("the model has too many layers")
    return text.ljust(start - PREFIX_BYTES)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _pieces(kept: Mapping[str, PackedWeight]) -> Iterator[memoryview | bytes]:
    for weight in kept.values():
        for tensor in weight.tensors:
            memory = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(memory), PIECE_BYTES):
                yield memory[start : start + PIECE_BYTES]
            yield bytes(-len(memory) % ALIGNMENT)
