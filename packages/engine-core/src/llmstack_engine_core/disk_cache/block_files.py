"""Files of one private folder, whose owners share a bound of bytes fairly."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

LOCK_FILE: Final = "lock"
_FILE_NAME: Final = re.compile(r"([0-9a-f]{64})([0-9a-f]{16})?")
_UNFINISHED: Final = "unfinished"
_MAX_KEPT_FREE_BYTES: Final = 1 << 30
_MAX_KEPT_FREE_SHARE: Final = 1 / 16
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlockMissError(Exception):
    """A file is not on the disk as it was written.

    Attributes:
        cause: One of `DISK_MISS_CAUSES`.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(f"the block on disk is {cause}")
        self.cause = cause


class _File(NamedTuple):
    """A file in the folder: its owner, and its size in bytes."""

    owner: str
    size: int


class BlockFiles:
    """Bytes by names of 64 hexadecimal digits, each in a file of mode 0600. For any thread.

    Each file has an owner: 16 hexadecimal digits that end the name of its file, or none. Where room is short, the owner
    with the most bytes loses the file that it used least recently. So an owner that holds no more than its share, the
    bound divided by the number of owners, loses none to others.

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
        self._name_to_file: dict[str, _File] = {}
        self._owner_to_names: dict[str, OrderedDict[str, None]] = {}  # that used last is the last
        self._owner_to_num_bytes: Counter[str] = Counter()
        with suppress(FileNotFoundError):  # of a process that was killed while it wrote
            os.unlink(_UNFINISHED, dir_fd=folder)
        for name, file in self._scan():
            self.remove(name)  # of two files with one name the later one counts
            self._add(name, file)
        for name in self._names_to_drop("", 0) or ():
            self.remove(name)

    def __len__(self) -> int:
        return len(self._name_to_file)

    def __contains__(self, name: object) -> bool:
        return name in self._name_to_file

    def read(self, name: str, num_bytes: int) -> bytearray:
        """The bytes of a file, as they are.

        Raises:
            BlockMissError: There is none, it has another size than `num_bytes`, or it cannot be read.
        """
        known = self._name_to_file.get(name)
        if known is None:
            raise BlockMissError("absent")
        content = bytearray(num_bytes)
        try:
            with self._opened(name + known.owner, _READ_FLAGS) as file:
                status = os.fstat(file)
                is_whole = stat.S_ISREG(status.st_mode) and status.st_size == num_bytes
                if not is_whole or not _fill(file, content):
                    raise BlockMissError("damaged")
        except FileNotFoundError:
            raise BlockMissError("absent") from None
        except OSError:
            raise BlockMissError("unreadable") from None
        return content

    def write(self, name: str, parts: Sequence[bytes], owner: str = "") -> bool:
        """Writes a file in place of one of the same name, of any owner.

        False where the disk has no room for it, or its owner alone would have to make room, and has nothing else left.

        Raises:
            OSError: It cannot be written.
        """
        size = sum(map(len, parts))
        if size > self._max_bytes or self._is_disk_short(size):
            return False
        with self._writing:
            self.remove(name)
            gone = self._names_to_drop(owner, size)
            if gone is None:
                return False
            for other in gone:
                self.remove(other)
            try:
                with self._opened(_UNFINISHED, _WRITE_FLAGS) as file:
                    for part in parts:
                        _write_all(file, part)
                os.rename(_UNFINISHED, name + owner, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except OSError:
                with suppress(OSError):  # the first error says more
                    os.unlink(_UNFINISHED, dir_fd=self._folder)
                raise
            with self._lock:
                self._add(name, _File(owner, size))
        return True

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._lock:
            file = self._name_to_file.pop(name, None)
            if file is None:
                return
            owner, names = file.owner, self._owner_to_names[file.owner]
            del names[name]
            if not names:
                del self._owner_to_names[owner]
            self._count(owner, -file.size)
            with suppress(OSError):  # what has taken its place is not ours
                os.unlink(name + owner, dir_fd=self._folder)

    def clear(self) -> None:
        """Removes every file that it knows."""
        for name in list(self._name_to_file):
            self.remove(name)

    def touch(self, names: Sequence[str]) -> None:
        """Notes the use of a prefix: its names in order, of which the first is evicted last."""
        now_ns = time.time_ns()
        for place, name in enumerate(reversed(names)):
            with self._lock:
                file = self._name_to_file.get(name)
                if file is None:
                    continue
                self._owner_to_names[file.owner].move_to_end(name)
            with suppress(OSError):
                os.utime(name + file.owner, ns=(now_ns + place,) * 2, dir_fd=self._folder, follow_symlinks=False)

    def close(self) -> None:
        """Closes the folder, so that another process may use it."""
        os.close(self._folder)
        os.close(self._held)

    def _scan(self) -> list[tuple[str, _File]]:
        """The files of the folder, that used last the last."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                parts = _FILE_NAME.fullmatch(entry.name)
                if parts and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, parts[1], _File(parts[2] or "", status.st_size)))
        return [(name, file) for _, name, file in sorted(found)]

    def _add(self, name: str, file: _File) -> None:
        self._name_to_file[name] = file
        self._owner_to_names.setdefault(file.owner, OrderedDict())[name] = None
        self._count(file.owner, file.size)

    def _count(self, owner: str, size: int) -> None:
        self.num_bytes += size
        self._owner_to_num_bytes[owner] += size
        if owner not in self._owner_to_names:
            del self._owner_to_num_bytes[owner]

    def _names_to_drop(self, owner: str, size: int) -> list[str] | None:
        """The files that make room for a new one of an owner; None where it would have to go itself."""
        names: list[str] = []
        with self._lock:
            excess = self.num_bytes + size - self._max_bytes
            if excess <= 0:
                return names
            held = self._owner_to_num_bytes.copy()
            held[owner] += size
            oldest = {one: iter(kept) for one, kept in self._owner_to_names.items()}
            while excess > 0:
                largest = max(held, key=lambda one: (held[one], one == owner))
                name = next(oldest.get(largest, iter(())), None)
                if name is None:
                    return None
                names.append(name)
                excess -= self._name_to_file[name].size
                held[largest] -= self._name_to_file[name].size
        return names

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
