"""Texts of tokens are read in all ranks beside their steps, and before a step needs them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from parallel_helpers.families import write_family
from parallel_helpers.schedules import NUM_BLOCKS, make_config
from parallel_helpers.thread_peers import ThreadPeers

from llmstack_model_runner.sampling.infill import TokenTexts
from llmstack_parallel.runner import ParallelRunner


@pytest.fixture
def runner(tmp_path: Path) -> ParallelRunner:
    return ParallelRunner(make_config(write_family(tmp_path, "gpt2"), tensor_parallel_size=2), ThreadPeers)


def test_each_rank_reads_by_a_message_and_computes_meanwhile(
    runner: ParallelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, readers = threading.Event(), list[str]()

    def read(texts: TokenTexts) -> None:
        assert may_read.wait(60)
        readers.append(threading.current_thread().name)

    monkeypatch.setattr(TokenTexts, "read", read)
    try:
        runner.load_model()
        runner.announce_token_texts()
        runner.initialize_kv_cache(NUM_BLOCKS)  # both ranks compute the steps of the warm-up
        assert readers == []
        may_read.set()
        runner.read_token_texts()
        runner.hold_token_texts()
        assert len(readers) == 2
        assert sum(name.startswith("read-beside") for name in readers) == 1
    finally:
        may_read.set()
        runner.shutdown()


def test_a_rank_that_cannot_read_says_so_and_computes_on(
    runner: ParallelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(texts: TokenTexts) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("it is gone")

    try:
        runner.load_model()
        with monkeypatch.context() as patch:
            patch.setattr(TokenTexts, "read", read)
            runner.announce_token_texts()
            runner.read_token_texts()
            with pytest.raises(ValueError, match="it is gone"):
                runner.hold_token_texts()
        monkeypatch.setattr(TokenTexts, "read", lambda texts: None)
        runner.announce_token_texts()
        runner.hold_token_texts()
        runner.initialize_kv_cache(NUM_BLOCKS)
    finally:
        runner.shutdown()
