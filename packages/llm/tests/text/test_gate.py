"""Order and bounds of work on long texts."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from llmstack_llm.text import gate
from llmstack_llm.text.gate import MAX_LARGE_CHARS, MAX_SMALL_CHARS, TextGate
from llmstack_llm.text.tokenizer import MAX_CHARS_ON_LOOP
from llmstack_types import ServerOverloadedError

SMALL, LARGE = MAX_SMALL_CHARS, MAX_LARGE_CHARS


class Work:
    """Work in threads that ends when the test says so.

    Attributes:
        started: Names in the order in which the work began.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self._name_to_end: dict[str, threading.Event] = {}

    def run(self, name: str) -> str:
        self.started.append(name)
        self.end_of(name).wait(10)
        return name

    def end_of(self, name: str) -> threading.Event:
        return self._name_to_end.setdefault(name, threading.Event())

    def end_all(self, *names: str) -> None:
        for name in names:
            self.end_of(name).set()


async def test_a_text_without_a_thread_is_refused_and_a_later_one_is_not(monkeypatch: pytest.MonkeyPatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    texts = TextGate()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for num_chars in (SMALL, LARGE):
            with pytest.raises(ServerOverloadedError) as caught:
                await texts.run(num_chars, str, "x")
            assert caught.value.reason == "tokenization"
    assert await texts.run(LARGE, str, "y") == "y"


async def test_an_error_of_the_work_itself_is_not_one_of_threads():
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await TextGate().run(SMALL, fail)


async def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come")


def begin(texts: TextGate, work: Work, name: str, num_chars: int) -> asyncio.Task[str]:
    return asyncio.ensure_future(texts.run(num_chars, work.run, name))


async def begin_all(texts: TextGate, work: Work, sizes: dict[str, int]) -> list[asyncio.Task[str]]:
    tasks = []
    for name, num_chars in sizes.items():
        tasks.append(begin(texts, work, name, num_chars))
        await asyncio.sleep(0)
    return tasks


async def ended(tasks: list[asyncio.Task[str]]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


async def test_a_short_text_needs_no_thread():
    threads = [await TextGate().run(size, threading.get_ident) for size in (MAX_CHARS_ON_LOOP, MAX_CHARS_ON_LOOP + 1)]
    assert threads[0] == threading.get_ident() != threads[1]


@pytest.mark.parametrize(("work_s", "is_on_loop"), [(0.3, False), (0.2, True)])
async def test_after_slow_work_no_text_holds_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, work_s: float, is_on_loop: bool
):
    clocks = SimpleNamespace(
        monotonic=iter([0.0, 0.2, 1.0, 1.3]).__next__,  # the second one may have waited for the processor
        thread_time=iter([0.0, work_s, 1.0, 1.0]).__next__,
    )
    monkeypatch.setattr(gate, "time", clocks)
    work = TextGate()
    threads = [await work.run(1, threading.get_ident) for _ in range(4)]
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, True, True, is_on_loop]


async def test_a_small_text_does_not_wait_for_large_ones():
    texts, work = TextGate(), Work()
    tasks = await begin_all(texts, work, {f"large {index}": 4 * LARGE for index in range(7)})
    await wait_for(lambda: work.started == ["large 0"])  # its thread runs
    small = begin(texts, work, "small", 10_000)
    work.end_all("small")
    assert await asyncio.wait_for(small, 10) == "small"
    assert work.started == ["large 0", "small"]
    assert texts.num_waiting == 6
    work.end_all(*(f"large {index}" for index in range(7)))
    await ended(tasks)
    assert texts.num_waiting == 0


async def test_the_characters_in_work_are_bounded():
    texts, work = TextGate(), Work()
    tasks = await begin_all(texts, work, dict.fromkeys("abc", LARGE // 2))
    await wait_for(lambda: len(work.started) == 2)
    assert texts.num_waiting == 1
    work.end_all("a")
    await wait_for(lambda: len(work.started) == 3)
    work.end_all(*"bc")
    await ended(tasks)


async def test_shorter_texts_overtake_but_none_waits_for_more_than_its_own_length():
    texts, work = TextGate(), Work()
    sizes = {"first": LARGE, "long": LARGE, **{f"short {index}": LARGE // 4 for index in range(3)}}
    tasks = await begin_all(texts, work, sizes)
    work.end_all("first")
    await wait_for(lambda: len(work.started) == 4)
    assert sorted(work.started[1:]) == ["short 0", "short 1", "short 2"]  # all at once, in threads of their own
    tasks += await begin_all(texts, work, {f"late {index}": LARGE // 4 for index in range(8)})
    work.end_all("long", *(f"short {index}" for index in range(3)), *(f"late {index}" for index in range(8)))
    await ended(tasks)
    assert work.started.index("long") < work.started.index("late 7")


async def test_a_cancelled_caller_leaves_the_queue_to_the_others():
    texts, work = TextGate(), Work()
    (working,) = await begin_all(texts, work, {"a": LARGE // 2})
    await wait_for(lambda: work.started == ["a"])
    waiting, next_one = await begin_all(texts, work, {"b": LARGE - 1, "c": LARGE // 2})
    waiting.cancel()
    third = begin(texts, work, "d", LARGE)
    await wait_for(lambda: work.started == ["a", "c"])
    third.cancel()
    await ended([waiting, third])
    assert texts.num_waiting == 0
    work.end_all("a", "c")
    await ended([working, next_one])
    assert work.started == ["a", "c"]


async def test_work_of_a_caller_that_left_still_counts_until_its_thread_ends():
    texts, work = TextGate(), Work()
    left = begin(texts, work, "left", LARGE)
    await wait_for(lambda: work.started == ["left"])
    left.cancel()
    await ended([left])
    second = begin(texts, work, "second", LARGE)
    await asyncio.sleep(0.02)
    assert work.started == ["left"]
    work.end_all("left", "second")
    assert await asyncio.wait_for(second, 10) == "second"


async def test_who_leaves_at_the_moment_of_the_start_gives_the_place_back():
    texts, work = TextGate(), Work()
    tasks = await begin_all(texts, work, {"a": LARGE, "b": LARGE, "c": LARGE})
    await wait_for(lambda: work.started == ["a"])
    texts._large.leave(LARGE)  # "b" may start, and its task has not run since
    tasks[1].cancel()
    await wait_for(lambda: "c" in work.started)
    assert work.started == ["a", "c"]
    work.end_all("a", "c")
    texts._large._working_chars += LARGE  # what was given back above
    await ended(tasks)


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch):
    texts, work = TextGate(), Work()
    monkeypatch.setattr(gate, "MAX_WAITING_CHARS", 3 * LARGE)
    tasks = await begin_all(texts, work, {"a": LARGE, "b": 4 * LARGE})  # alone in the queue, so never refused
    with pytest.raises(ServerOverloadedError) as caught:
        await texts.run(LARGE, work.run, "c")
    assert caught.value.reason == "tokenization"
    monkeypatch.setattr(gate, "MAX_WAITERS", 1)
    with pytest.raises(ServerOverloadedError):
        await texts.run(SMALL + 1, work.run, "d")
    work.end_all("a", "b", "e")
    await ended([*tasks, begin(texts, work, "e", SMALL)])
    assert sorted(work.started) == ["a", "b", "e"]


async def test_an_error_reaches_the_caller_and_frees_the_place():
    texts = TextGate()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await texts.run(2 * LARGE, lambda: 1 / 0)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_memory_returns_after_large_texts():
    source = (
        "import asyncio; from pathlib import Path\n"
        "from tokenizers.pre_tokenizers import ByteLevel\n"
        "from llmstack_llm.testing import byte_tokenizer\n"
        "from llmstack_llm.text.gate import TextGate\n"
        "from llmstack_llm.text.tokenizer import Tokenizer\n"
        "def rss(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 >> 20\n"
        "async def run():\n"
        "    backend = byte_tokenizer()\n"
        "    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)  # words, as in a real vocabulary\n"
        "    texts, tokenizer = TextGate(), Tokenizer(backend)\n"
        "    count = lambda text: len(tokenizer.encode(text))\n"
        "    before = rss()\n"
        "    sizes = [1 << 20] * 3\n"
        "    found = await asyncio.gather(*[texts.run(size, count, 'x y' * (size // 3)) for size in sizes])\n"
        "    assert found == [size // 3 * 3 for size in sizes]\n"
        "    print(before, rss())\n"
        "asyncio.run(run())\n"
    )
    out = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout
    before, after = map(int, out.split())
    assert after - before < 32


async def test_other_tasks_run_between_the_short_texts_of_one():
    texts, turns = TextGate(), list[int]()

    async def note_turns() -> None:
        while len(done) < 2:
            turns.append(len(order))
            await asyncio.sleep(0)

    async def run_all(name: str) -> None:
        for _ in range(64):
            await texts.run(MAX_CHARS_ON_LOOP // 4, order.append, name)
        done.append(name)

    order, done = list[str](), list[str]()
    await asyncio.gather(run_all("a"), run_all("b"), note_turns())
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 4
    assert min(order[:64].count(name) for name in "ab") >= 8  # and neither of them waits for the other's end


async def test_a_short_text_alone_does_not_wait():
    texts = TextGate()
    running = texts.run(MAX_CHARS_ON_LOOP, str, "x")
    with pytest.raises(StopIteration) as ended:
        running.send(None)
    assert ended.value.value == "x"
    await asyncio.sleep(0)  # the next turn has room again
    with pytest.raises(StopIteration):
        texts.run(MAX_CHARS_ON_LOOP, str, "y").send(None)


async def test_a_short_text_whose_caller_leaves_gives_its_turn_to_the_next():
    texts, order = TextGate(), list[str]()
    running = [asyncio.ensure_future(texts.run(MAX_CHARS_ON_LOOP, order.append, name)) for name in "abc"]
    await asyncio.sleep(0)
    assert order == ["a"]
    running[1].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert order == ["a", "c"]
    assert await texts.run(MAX_CHARS_ON_LOOP, str, "d") == "d"


def test_an_event_loop_that_has_ended_leaves_no_turn_behind():
    texts = TextGate()
    for _ in range(2):
        assert asyncio.run(texts.run(MAX_CHARS_ON_LOOP, str, "x")) == "x"
        texts._turn_chars = MAX_CHARS_ON_LOOP  # as where it ended before its next turn
