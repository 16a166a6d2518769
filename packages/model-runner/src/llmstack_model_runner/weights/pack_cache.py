"""A cache of packed weights in files, so that they are packed once.

Only the owner of its folder may enter it. A file is read into memory of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch

from llmstack_kernels.linear import PackedLinear, PackedWeight, packed_weights, packing_version
from llmstack_kernels.native.huge_pages import empty_in_huge_pages
from llmstack_model_files import read_ahead
from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.packed_files import SHARE_OF_MEMORY, SUFFIX, cache_folder, files_digest
from llmstack_model_runner.weights.pack_file import (
    DTYPES,
    KeptWeights,
    num_elements,
    read_header,
    tensors_of,
    write_file,
)
from llmstack_types import ModelRunnerConfig

logger = logging.getLogger(__name__)

MAX_CACHE_BYTES = 32 << 30
# Less is packed within a tenth of a second.
MIN_BYTES = 64 << 20
MIN_FREE_BYTES = 2 << 30
# Most of the time is the first touch of new memory, which several threads divide; measured, 2 are twice as fast as 1.
READ_BYTES = 1 << 21
MAX_READERS = 4
LOWEST_PRIORITY = 19
LEFTOVER_S = 3600.0
# The rest of the start and the first requests go first.
WRITE_DELAY_S = 3.0
_CODE = (
    *(f"llmstack_model_runner.{name}" for name in ("checkpoint_formats", "encoders", "layers", "models", "weights")),
    "llmstack_kernels.linear", "llmstack_gguf",
)  # fmt: skip


@functools.cache
def code_digest() -> str:
    """Digest of the code that reads, reduces and orders weights before kernels pack them."""
    digest = hashlib.blake2b(digest_size=16)
    for package in _CODE:
        found = find_spec(package)  # which does not import it
        for folder in found.submodule_search_locations or () if found is not None else ():
            for path in sorted(Path(folder).glob("*.py")):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def kept_weights(
    config: ModelRunnerConfig, model_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, rank: Sharding
) -> Iterator[PackCache | None]:
    """The cache of a model's packed weights, while they are loaded; what was packed then is written.

    None where it is off, or where no weights are packed that can be kept, as on a GPU.
    """
    version = packing_version(device.type) if device.type == "cpu" else ""
    # A user without a home has no folder of their own.
    is_lasting = config.load_format != "dummy" and not config.weights_path  # weights in place of others are soon gone
    if not config.pack_cache or not version or not is_lasting or not cache_folder().is_absolute():
        yield None
        return

    def identity() -> str:
        parts = {
            "version": version, "dtype": str(dtype),
            "quantization": config.quantization, "gguf_activations": config.gguf_activations,
            "config": model_config, "model_impl": config.model_impl,
            "is_batch_invariant": config.enable_deterministic_inference, "code": code_digest(),
            "rank": [rank.rank, rank.size, rank.stage, rank.num_stages, rank.is_expert_parallel],
        }  # fmt: skip
        digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
        return f"{files_digest(Path(config.model_path))}-{digest}"

    before = identity()
    cache = PackCache(before, cache_folder(), num_ranks=rank.size * rank.num_stages)
    try:
        yield cache
        cache.finish(is_current=identity() == before)
    finally:
        cache.close()


class PackCache:
    """The packed weights of one model: read from a cache file, or collected to write one.

    It never fails a start: what cannot be read is packed again, and what cannot be written is not kept.
    """

    def __init__(self, identity: str, folder: Path, *, num_ranks: int = 1) -> None:
        """`identity`: Digests of all that packed weights depend on: files, configuration, data type, rank and code.

        `num_ranks`: How many have a file of about the same size; nothing is kept where there is no room for all.
        """
        self._folder = folder
        self._num_ranks = num_ranks
        self._path = folder / f"{identity}{SUFFIX}"
        self._entries: Mapping[str, Any] = {}
        self._file: BinaryIO | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._kept: dict[str, tuple[PackedWeight, ...]] = {}
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
        parts = self._entries.get(name)
        if not parts:
            return False
        return (sum(part["shape"][0] for part in parts), parts[0]["shape"][1]) == shape

    def read(self, name: str) -> tuple[PackedWeight, ...]:
        """The packed weights of a layer that it has, one per part.

        Raises:
            ValueError: The file cannot be read; it is removed, so that the next start packs again.
        """
        try:
            return tuple(self._read_part(part) for part in self._entries[name])
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise ValueError(f"{self._path}: packed weights cannot be read ({error}); start again") from error

    def _read_part(self, part: Mapping[str, Any]) -> PackedWeight:
        tensors = [self._read_tensor(described) for described in part["tensors"]]
        order = tensors.pop() if part["has_order"] else None
        shape = (int(part["shape"][0]), int(part["shape"][1]))
        group_size = int(part["group_size"])
        return PackedWeight(shape, DTYPES[part["dtype"]], str(part["scheme"]), group_size, tuple(tensors), order)

    def keep(self, name: str, packed: PackedLinear) -> None:
        """Notes a layer that was packed in this start."""
        parts = packed_weights(packed)
        if parts is not None:
            self._kept[name] = parts

    def finish(self, *, is_current: bool) -> threading.Thread | None:
        """Writes what was packed, in a thread that this process does not wait for.

        `is_current`: Whether the files of the model are still those of `identity`.
        """
        was_hit = self.is_hit
        self.close()
        kept, self._kept = self._kept, {}
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(kept))
        if was_hit or not is_current or not MIN_BYTES <= num_bytes <= MAX_CACHE_BYTES // self._num_ranks:
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
        entries = read_header(self._file, status.st_size)
        os.utime(self._path)  # used last
        num_threads = min(MAX_READERS, torch.get_num_threads())
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="pack-cache-read")
        self._entries = entries
        read_ahead([self._path], (available_memory_bytes() or 0) // SHARE_OF_MEMORY)

    def close(self) -> None:
        """Closes the file; nothing can be read then."""
        self._entries = {}
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_tensor(self, described: Mapping[str, Any]) -> torch.Tensor:
        if self._readers is None:
            raise ValueError("the packed weights are closed")
        shape, dtype = tuple(described["shape"]), DTYPES[described["dtype"]]
        tensor = empty_in_huge_pages(num_elements(shape), dtype)
        memory = tensor.view(torch.uint8).numpy().data
        starts = range(0, len(memory), READ_BYTES)
        pieces = [memory[start : start + READ_BYTES] for start in starts]
        offsets = [int(described["offset"]) + start for start in starts]
        list(self._readers.map(self._read_piece, pieces, offsets))  # raises what a reader raises
        return tensor.view(shape)

    def _read_piece(self, memory: memoryview, offset: int) -> None:
        if self._file is None:
            raise ValueError("the packed weights are closed")
        while memory:
            num_read = os.preadv(self._file.fileno(), [memory], offset)
            if not num_read:
                raise OSError("the file has become shorter")
            memory, offset = memory[num_read:], offset + num_read

    def _write(self, kept: KeptWeights, num_bytes: int) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)  # of this thread
        time.sleep(WRITE_DELAY_S)
        try:
            make_own_folder(self._folder)
            with _only_writer(self._folder):
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


def check_own(status: os.stat_result, folder: Path) -> None:
    """Raises ValueError unless it is a folder of this user, closed to all others."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{folder} is no folder that only this user may enter (mode 0700)")


def make_own_folder(folder: Path) -> None:
    """Makes the folder where it is missing, and checks that it is our own."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own(os.stat(folder, follow_symlinks=False), folder)


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Waits until no other process, such as another rank, writes into the folder and uses up its space."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_room(folder: Path, num_bytes: int) -> None:
    """Removes what was used least recently, until so many bytes more fit the limit; and what others did not finish."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # removed by another process
            status = path.lstat()
            if path.name.startswith(".") and time.time() - status.st_mtime > LEFTOVER_S:
                path.unlink()
            elif path.name.endswith(SUFFIX):
                files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total + num_bytes <= MAX_CACHE_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size
