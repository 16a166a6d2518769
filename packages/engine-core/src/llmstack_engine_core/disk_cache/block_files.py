"""Files of one private folder under a bound of bytes, evicted by least recent use."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

LOCK_FILE: Final = "lock"
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_UNFINISHED: Final = "unfinished"
_MAX_KEPT_FREE_BYTES: Final = 1 << 30
_MAX_KEPT_FREE_SHARE: Final = 1 / 16
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlockMissError(Exception):
    """What was looked for is not on the disk as it was written.

    Attributes:
        cause: One of `DISK_MISS_CAUSES`.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"the block on disk is {cause}")
        self.cause = cause


class BlockFiles:
    """Bytes by names of 64 hexadecimal digits, each in a file of mode 0600. For any thread.

    A file appears whole or not at all, whenever the process is killed. None is written while the file system has less
    than 1 GiB left, or a sixteenth of it where that is less. Nothing is flushed: after a loss of power a file may hold
    anything, which is for the caller to notice.

    Attributes:
        num_bytes: The size of all files.
    """

    def __init__(self, folder: int, held: int, max_bytes: int) -> None:
        """Takes the files that are there; those that do not fit into `max_bytes` are removed.

        `folder` and `held`: Descriptors of it and of its lock, which are closed at the end.

        Raises:
            OSError: The folder cannot be read.
        """
        self.num_bytes = 0
        self._folder, self._held = folder, held
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._name_to_size: OrderedDict[str, int] = OrderedDict()  # that used last is the last
        with suppress(FileNotFoundError):  # of a process that was killed while it wrote
            os.unlink(_UNFINISHED, dir_fd=folder)
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        for _, name, size in sorted(found):
            self._name_to_size[name] = size
            self.num_bytes += size
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._name_to_size)

    def __contains__(self, name: object) -> bool:
        return name in self._name_to_size

    def read(self, name: str, num_bytes: int) -> bytearray:
        """The bytes of a file, as they are.

        Raises:
            BlockMissError: There is none, it has another size than `num_bytes`, or it cannot be read.
        """
        if name not in self._name_to_size:
            raise BlockMissError("absent")
        content = bytearray(num_bytes)
        try:
            with self._opened(name, _READ_FLAGS) as file:
                status = os.fstat(file)
                is_whole = stat.S_ISREG(status.st_mode) and status.st_size == num_bytes
                if not is_whole or not _fill(file, content):
                    raise BlockMissError("damaged")
        except FileNotFoundError:
            raise BlockMissError("absent") from None
        except OSError:
            raise BlockMissError("unreadable") from None
        return content

    def write(self, name: str, parts: Sequence[bytes]) -> bool:
        """Writes a file in place of one of the same name; False where the bound or the disk has no room for it.

        Raises:
            OSError: It cannot be written.
        """
        size = sum(map(len, parts))
        if size > self._max_bytes or self._is_disk_short(size):
            return False
        with self._writing:
            self.remove(name)
            with self._lock:
                self._make_room(size)
            try:
                with self._opened(_UNFINISHED, _WRITE_FLAGS) as file:
                    for part in parts:
                        _write_all(file, part)
                os.rename(_UNFINISHED, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError:
                with suppress(OSError):  # the first error says more
                    os.unlink(_UNFINISHED, dir_fd=self._folder)
                raise
            with self._lock:
                self._name_to_size[name] = size
                self.num_bytes += size
        return True

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._lock:
            size = self._name_to_size.pop(name, None)
            if size is not None:
                self._unlink(name, size)

    def clear(self) -> None:
        """Removes every file that it knows."""
        for name in list(self._name_to_size):
            self.remove(name)

    def touch(self, names: Sequence[str]) -> None:
        """Notes the use of a prefix: its names in order, of which the first is evicted last."""
        now_ns = time.time_ns()
        for place, name in enumerate(reversed(names)):
            with self._lock:
                if name not in self._name_to_size:
                    continue
                self._name_to_size.move_to_end(name)
            with suppress(OSError):
                os.utime(name, ns=(now_ns + place,) * 2, dir_fd=self._folder, follow_symlinks=False)

    def close(self) -> None:
        """Closes the folder, which others may use then."""
        os.close(self._folder)
        os.close(self._held)

    def _make_room(self, size: int) -> None:
        while self.num_bytes + size > self._max_bytes:
            name, freed = self._name_to_size.popitem(last=False)
            self._unlink(name, freed)

    def _unlink(self, name: str, size: int) -> None:
        self.num_bytes -= size
        with suppress(OSError):  # what has taken its place is not ours
            os.unlink(name, dir_fd=self._folder)

    def _is_disk_short(self, size: int) -> bool:
        status = os.fstatvfs(self._folder)
        total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        return free - size < min(_MAX_KEPT_FREE_BYTES, int(total * _MAX_KEPT_FREE_SHARE))

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(name, flags, 0o600, dir_fd=self._folder)
        try:
            yield file
        finally:
            os.close(file)


def _fill(file: int, content: bytearray) -> bool:
    done = 0
    with memoryview(content) as view:
        while done < len(content):
            count = os.preadv(file, [view[done:]], done)
            if not count:
                return False
            done += count
    return True


def _write_all(file: int, part: bytes) -> None:
    done = 0
    with memoryview(part) as view:
        while done < len(part):
            done += os.write(file, view[done:])
