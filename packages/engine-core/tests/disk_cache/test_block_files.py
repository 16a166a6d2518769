"""Files of blocks: what was written or nothing, under a bound, and never outside of the folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core.disk_cache import block_files
from llmstack_engine_core.disk_cache.block_files import BlockFiles, BlockMissError

NAMES = [f"{number:064x}" for number in range(6)]


class Folder:
    """A folder, and the files that are opened in it one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: BlockFiles | None = None

    def open(self, max_bytes: int = 1 << 20) -> BlockFiles:
        self.close()
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.files = BlockFiles(folder, os.dup(folder), max_bytes)
        return self.files

    def close(self) -> None:
        if self.files is not None:
            self.files.close()
        self.files = None


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.close()


def cause(files: BlockFiles, name: str, num_bytes: int) -> str:
    with pytest.raises(BlockMissError) as caught:
        files.read(name, num_bytes)
    return caught.value.cause


SIZES = st.integers(0, 40)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(NAMES), SIZES),
        st.tuples(st.just("touch"), st.lists(st.sampled_from(NAMES), unique=True), st.just(0)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("open"), st.just(""), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=50)
@given(actions=ACTIONS, max_bytes=st.integers(1, 100))
def test_files_are_those_used_last_under_the_bound(
    actions: list[tuple[str, list[str] | str, int]], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = Folder(tmp_path_factory.mktemp("files"))
    files, expected = folder.open(max_bytes), {}
    clock = iter(range(10**9, 10**12, 10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_files.time, "time_ns", lambda: next(clock))
        for action, name, size in actions:
            if action == "write":
                content = os.urandom(size)
                is_written = files.write(name, [content[:3], content[3:]])
                assert is_written == (size <= max_bytes)
                if is_written:
                    expected.pop(name, None)
                    while size + sum(map(len, expected.values())) > max_bytes:
                        del expected[next(iter(expected))]
                    expected[name] = content
                    files.touch([name])  # files written within one tick of the clock would have no order on disk
            elif action == "touch":
                files.touch(name)
                for one in reversed([one for one in name if one in expected]):
                    expected[one] = expected.pop(one)
            elif action == "remove":
                files.remove(name)
                expected.pop(name, None)
            else:
                files = folder.open(max_bytes)
            on_disk = {path.name: path.read_bytes() for path in folder.path.iterdir()}
            assert on_disk == expected
            assert files.num_bytes == sum(map(len, expected.values())) <= max_bytes
            assert all(files.read(one, len(content)) == content for one, content in expected.items())
    folder.close()


OWNERS = ["", "0123456789abcdef", "fedcba9876543210"]
FAIR_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(OWNERS), st.integers(0, 7), SIZES),
        st.tuples(st.just("touch"), st.sampled_from(OWNERS), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("open"), st.just(""), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def held_by(folder: Folder) -> dict[str, dict[str, int]]:
    """The sizes of the files of each owner, as they are in the folder."""
    held: dict[str, dict[str, int]] = {owner: {} for owner in OWNERS}
    for path in folder.path.iterdir():
        held[path.name[64:]][path.name[:64]] = path.stat().st_size
    return held


@settings(max_examples=100)
@given(actions=FAIR_ACTIONS, max_bytes=st.integers(40, 160))
def test_no_one_who_holds_a_fair_share_loses_a_file_to_others(
    actions: list[tuple[str, str, int, int]], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = Folder(tmp_path_factory.mktemp("files"))
    files = folder.open(max_bytes)
    for action, owner, number, size in actions:
        name, before = f"{OWNERS.index(owner):032x}{number:032x}", held_by(folder)
        if action == "write":
            is_written = files.write(name, [bytes(size)], owner)
            after, num_owners = held_by(folder), sum(bool(names) or one == owner for one, names in before.items())
            for other in {*OWNERS} - {owner}:
                if sum(before[other].values()) * num_owners <= max_bytes:
                    assert after[other] == before[other]
            assert is_written == (name in after[owner])
            if sum(before[owner].values()) - before[owner].get(name, 0) + size <= max_bytes // num_owners:
                assert is_written, "there is room for what is no more than its share"
        elif action == "touch":
            files.touch([name])
        else:
            files = folder.open(max_bytes)
            assert held_by(folder) == before, "what fits is kept"
        sizes = [size for names in held_by(folder).values() for size in names.values()]
        assert files.num_bytes == sum(sizes) <= max_bytes
        assert len(files) == len(sizes)
    folder.close()


@settings(max_examples=30)
@given(owners=st.lists(st.sampled_from(OWNERS), min_size=1, max_size=12), max_bytes=st.integers(10, 120))
def test_a_smaller_bound_takes_from_the_largest_owner(
    owners: list[str], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = Folder(tmp_path_factory.mktemp("files"))
    files = folder.open()
    for number, owner in enumerate(owners):
        assert files.write(f"{number:064x}", [bytes(10)], owner)
        os.utime(folder.path / f"{number:064x}{owner}", ns=(number, number))
    kept = {owner: [number for number, one in enumerate(owners) if one == owner] for owner in {*owners}}
    while 10 * sum(map(len, kept.values())) > max_bytes:
        max(kept.values(), key=len).pop(0)
    folder.open(max_bytes)
    counts = {owner: len(names) for owner, names in held_by(folder).items() if names}
    assert sorted(counts.values()) == sorted(len(numbers) for numbers in kept.values() if numbers)
    for owner, count in counts.items():
        newest = [number for number, one in enumerate(owners) if one == owner][-count:]
        assert sorted(held_by(folder)[owner]) == [f"{number:064x}" for number in newest]
    folder.close()


def test_a_busy_owner_makes_room_for_itself_after_a_restart_too(folder: Folder):
    quiet, busy = OWNERS[1:]
    files = folder.open(max_bytes=100)
    for number in range(3):
        files.write(f"{number:064x}", [bytes(10)], quiet)
    for round_number in range(3):
        for number in range(20):
            files.write(f"{100 * (round_number + 1) + number:064x}", [bytes(10)], busy)
        files = folder.open(max_bytes=100)
    held = held_by(folder)
    assert (len(held[quiet]), len(held[busy])) == (3, 7)
    assert sorted(held[busy]) == [f"{300 + number:064x}" for number in range(13, 20)]


def test_a_name_has_one_file_of_any_owner(folder: Folder):
    files = folder.open()
    for owner in OWNERS:
        assert files.write(NAMES[0], [owner.encode()], owner)
        assert files.read(NAMES[0], len(owner)) == owner.encode()
    assert [path.name for path in folder.path.iterdir()] == [NAMES[0] + OWNERS[-1]]
    (folder.path / NAMES[0]).write_bytes(b"earlier")
    os.utime(folder.path / NAMES[0], ns=(1, 1))
    assert len(folder.open()) == 1
    assert [path.name for path in folder.path.iterdir()] == [NAMES[0] + OWNERS[-1]]


def test_a_smaller_bound_removes_what_was_used_first(folder: Folder):
    files = folder.open()
    for name in NAMES:
        assert files.write(name, [b"12345678"])
    files.touch(NAMES)
    files = folder.open(max_bytes=20)
    assert [name in files for name in NAMES] == [True, True, False, False, False, False]


@pytest.mark.parametrize("num_bytes", [0, 3, 5])
def test_another_size_is_a_miss(folder: Folder, num_bytes: int):
    files = folder.open()
    files.write(NAMES[0], [b"1234"])
    assert cause(files, NAMES[0], num_bytes) == "damaged"
    (folder.path / NAMES[0]).write_bytes(b"123")
    assert cause(files, NAMES[0], 4) == "damaged"


def test_what_others_put_there_is_no_file(folder: Folder):
    files = folder.open()
    outside = folder.path.parent / f"{folder.path.name}-outside"
    outside.write_bytes(b"1234")
    (folder.path / "notes").write_text("not ours")
    for name in NAMES[:4]:
        files.write(name, [b"1234"])
        (folder.path / name).unlink()
    (folder.path / NAMES[0]).symlink_to(outside)
    os.mkfifo(folder.path / NAMES[1])
    (folder.path / NAMES[2]).mkdir()
    causes = [cause(files, name, 4) for name in NAMES[:4]]
    assert causes == ["unreadable", "damaged", "damaged", "absent"]
    assert len(folder.open()) == 0
    files = folder.open()
    assert files.write(NAMES[0], [b"5678"]), "a link is replaced"
    assert outside.read_bytes() == b"1234"
    with pytest.raises(OSError, match="directory"):
        files.write(NAMES[2], [b"5678"])
    assert (folder.path / "notes").read_text() == "not ours"


def test_files_are_readable_by_their_owner_alone(folder: Folder):
    old = os.umask(0)
    try:
        folder.open().write(NAMES[0], [b"1234"])
    finally:
        os.umask(old)
    assert (folder.path / NAMES[0]).stat().st_mode & 0o777 == 0o600


def test_half_a_file_of_a_killed_process_is_removed(folder: Folder):
    (folder.path / "unfinished").write_bytes(b"12")
    files = folder.open()
    assert list(folder.path.iterdir()) == []
    (folder.path / "unfinished").mkdir()
    with pytest.raises(OSError, match="exists"):
        files.write(NAMES[0], [b"1234"])
    assert files.num_bytes == 0


def test_nothing_is_written_while_the_disk_is_short(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    files, real = folder.open(), os.fstatvfs

    class Full:
        f_blocks, f_frsize, f_bavail = 1000, 4096, 62  # less than a sixteenth

    monkeypatch.setattr(os, "fstatvfs", lambda _: Full)
    assert not files.write(NAMES[0], [b"1234"])
    monkeypatch.setattr(os, "fstatvfs", real)
    assert files.write(NAMES[0], [b"1234"])


def test_writers_and_readers_in_turns_see_whole_files(folder: Folder):
    files = folder.open(max_bytes=4000)
    wrong: list[str] = []
    is_done = threading.Event()

    def write(seed: int) -> None:
        for number in range(60):
            files.write(NAMES[(seed + number) % len(NAMES)], [bytes([seed]) * 500, bytes([seed]) * 500])

    def read() -> None:
        while not is_done.is_set():
            for name in NAMES:
                try:
                    content = files.read(name, 1000)
                except BlockMissError as miss:
                    wrong.extend([miss.cause] * (miss.cause not in ("absent", "damaged")))
                else:
                    wrong.extend(["torn"] * (len(set(content)) != 1))

    writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2, 3)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    is_done.set()
    reader.join()
    assert wrong == []
    sizes = [path.stat().st_size for path in folder.path.iterdir()]
    assert files.num_bytes == sum(sizes) <= 4000
    assert set(sizes) == {1000}
