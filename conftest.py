"""Settings of the test run that no single package owns."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Compiled modules are kept even where the environment says otherwise. The tests start hundreds of processes, and each
# of them would compile the whole project again, as each worker of pytest would rewrite all assertions.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Several tests compute at once, each with as many threads as there are processors. Threads that wait must leave theirs
# to others: where they spin, as they do by default, a test of attention took 20 s of processor time in place of 8.
# It is read when PyTorch is first imported; servers that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell ignores Ctrl-C for what it starts in the background, and so would every process that a test starts and ends.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline is an assertion about time, and a shared machine breaks those: examples are limited by number instead.
settings.register_profile("llmstack", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run, so that a commit fails by its own change alone.
settings.register_profile("same-examples", settings.get_profile("llmstack"), derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Only the full run searches for new examples."""
    is_default = config.option.markexpr.startswith("not full")  # ... and not other marks
    settings.load_profile("same-examples" if is_default else "llmstack")
    if config.getoption("benchmark_only", default=False):
        _refuse_slow_kernels()
    gc.disable()  # until all tests are collected


_OUR_LOGGERS = [
    logging.getLogger(),
    *(logging.getLogger(folder.name) for folder in Path(__file__).parent.glob("packages/*/src/llmstack_*")),
]


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """A command that a test runs sets levels and handlers, as its process may."""
    root = _OUR_LOGGERS[0]
    levels, handlers = [logger.level for logger in _OUR_LOGGERS], root.handlers[:]
    yield
    for logger, level in zip(_OUR_LOGGERS, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _restore_garbage_collection() -> Iterator[None]:
    """What tunes it for a process of its own must not change when tests after it collect."""
    thresholds, was_enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if was_enabled else gc.disable)()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than there are cores: a test that starts a server waits for most of its time."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and PyTorch finds none"))


def pytest_collection_finish() -> None:
    """Ends the time without collections of garbage: what is imported to collect the tests stays."""
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keeps modules and tests out of later collections: in a long run each would look at millions of objects."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _refuse_slow_kernels() -> None:
    """A benchmark measures native kernels, or what LLMSTACK_KERNELS names in their place."""
    if importlib.util.find_spec("llmstack_kernels") is None or os.environ.get("LLMSTACK_KERNELS"):
        return
    from llmstack_kernels.native import REBUILD, library

    if library() is None:
        raise pytest.UsageError(f"the native kernels are not built, so nothing is measured: {REBUILD}")


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
