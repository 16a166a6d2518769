"""Prefixes that outlive an engine core: what is read gives the same tokens, and what cannot be read is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.cache_runner import BLOCK_SIZE
from engine_core_helpers.disk_core import PROMPT, SPEC, Core

from llmstack_engine_core import EngineConfig
from llmstack_engine_core.disk_cache import open_store, prefix_reads
from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
from llmstack_engine_core.disk_cache.write_behind import Pace
from llmstack_engine_core.stages import PrefixStage
from llmstack_types import EngineStartError, ModelRunnerConfig

NUM_STORED_TOKENS = 148


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def written(folder: Path) -> list[int]:
    """The tokens of an engine core that has ended."""
    core = Core(folder)
    tokens, *found = core.ask()
    assert found == [0, 0]
    core.close()
    return tokens


def test_a_prefix_is_found_after_a_restart(folder: Path, written: list[int]):
    core = Core(folder)
    assert core.ask() == (written, NUM_STORED_TOKENS, NUM_STORED_TOKENS)
    assert core.ask() == (written, NUM_STORED_TOKENS, 0), "now it is in memory"
    assert core.disk.num_tokens == NUM_STORED_TOKENS
    assert core.disk.num_read_bytes == NUM_STORED_TOKENS * 8
    assert core.misses() == {}
    core.close()


@pytest.mark.parametrize("num_tokens", [95, 96, 97, 98, 99, 100])
def test_the_same_prompt_is_found_to_its_last_block(folder: Path, num_tokens: int):
    core = Core(folder)
    core.ask(PROMPT[:num_tokens])
    core.close()
    core = Core(folder)
    assert core.ask(PROMPT[:num_tokens])[1] == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    core.close()


def test_the_next_turn_of_a_session_finds_the_answer_too(folder: Path, written: list[int]):
    core = Core(folder)
    _, num_cached_tokens, num_read = core.ask([*PROMPT, *written, *range(20)])
    assert num_cached_tokens == num_read == 152
    core.close()


def test_another_prompt_shares_whole_files_of_the_prefix(folder: Path, written: list[int]):
    core = Core(folder)
    assert core.ask([*PROMPT[:100], 1, *PROMPT[:20]])[1:] == (96, 96)
    core.close()


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20], ids=["many pieces", "one piece"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.7])
def test_what_was_damaged_is_computed(
    folder: Path, written: list[int], share: float, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefix_reads, "_PIECE_BYTES", piece_bytes)
    paths = sorted((path for path in folder.iterdir() if len(path.name) == 64), key=lambda one: one.stat().st_mtime_ns)
    for path in paths[: int(len(paths) * (1 - share))]:
        path.write_bytes(os.urandom(path.stat().st_size))
    core = Core(folder)
    tokens, num_cached_tokens, num_read = core.ask()
    assert tokens == written
    assert num_cached_tokens == num_read < NUM_STORED_TOKENS
    assert core.misses() == {"damaged": 1}
    core.close()
    core = Core(folder)
    assert core.ask() == (written, NUM_STORED_TOKENS, NUM_STORED_TOKENS), "it was written again"
    core.close()


@pytest.mark.parametrize("fields", [{"cache_salt": "other"}, {"lora_name": "mine@d1.1"}])
def test_clients_and_adapters_are_apart(folder: Path, written: list[int], fields: dict[str, Any]):
    core = Core(folder)
    request = core.request(PROMPT, **fields)
    assert not core.stored.hold(request)
    assert core.misses() == {"absent": 1}
    core.stored.forget([request.request_id])
    core.close()


def test_another_numeric_contract_finds_nothing(folder: Path, written: list[int]):
    core = Core(folder, contract="c1")
    assert core.ask() == (written, 0, 0)
    core.close()


def test_a_short_gain_is_computed(folder: Path, written: list[int]):
    core = Core(folder)
    num_tokens = prefix_reads.MIN_NUM_TOKENS
    assert core.ask(PROMPT[:num_tokens])[1:] == (0, 0)
    assert core.ask(PROMPT[: num_tokens + 40])[2] == 0, "what memory has is no gain"
    assert core.disk.num_requests == 0
    core.close()


def test_all_files_go_when_values_in_memory_were_wrong(folder: Path, written: list[int]):
    core = Core(folder)
    core.stored.distrust()
    core.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_many_requests_are_read_and_overtaken(folder: Path):
    prompts = [[number, *PROMPT] for number in range(6)]
    core = Core(folder)
    expected = [core.ask(prompt)[0] for prompt in prompts]
    core.close()
    core = Core(folder)
    for prompt in (*prompts, [30, 29, 28]):
        core.core.add_request(core.request(prompt))
    assert core.core.stats().num_waiting == 7
    outputs = core.finish()
    tokens = [[t for one in outputs if one.request_id == f"ask-{n + 1}" for t in one.new_token_ids] for n in range(6)]
    assert tokens == expected
    assert core.disk.num_tokens == 6 * NUM_STORED_TOKENS
    core.close()


def test_a_full_cache_computes(folder: Path, written: list[int]):
    core = Core(folder, num_blocks=60)
    blocking = core.request([5] * 100)
    core.core.add_request(blocking)
    core.core.step()
    core.core.add_request(core.request(PROMPT))
    tokens = [t for one in core.finish() if one.request_id == "ask-2" for t in one.new_token_ids]
    assert tokens == written
    core.close()


def test_a_request_that_waits_can_be_aborted(folder: Path, written: list[int], monkeypatch: pytest.MonkeyPatch):
    core = Core(folder)
    core.core.add_request(core.request(PROMPT))
    core.core.abort_requests(["ask-1"])
    assert core.finish() == []
    assert core.ask()[0] == written
    core.close()


def test_a_slow_disk_holds_no_request(folder: Path, written: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_reads, "READ_TIMEOUT_S", -1.0)
    monkeypatch.setattr(PrefixStore, "read", slow_read)
    core = Core(folder)
    assert core.ask() == (written, 0, 0)
    assert core.misses() == {"late": 1}
    core.close()


def slow_read(*_: Any) -> bytearray:
    import time

    time.sleep(0.2)
    return bytearray()


def test_blocks_are_written_while_there_is_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch):
    core = Core(folder)
    core.ask()
    while core.stored.is_in_use:
        core.core.work_when_idle()
    core.stored._writes.finish(5.0)
    assert core.disk.num_bytes == core.disk.num_written_bytes > NUM_STORED_TOKENS * 8
    core.close()


def test_an_aborted_request_leaves_what_it_computed(folder: Path):
    core = Core(folder)
    core.core.add_request(core.request(PROMPT))
    while not any(output.new_token_ids for output in core.core.step().outputs):
        pass
    core.core.abort_requests(["ask-1"])
    core.finish()
    core.close()
    assert sum(len(path.name) == 64 for path in folder.iterdir()) > 0


def test_nothing_is_written_of_a_step_that_failed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    core = Core(folder)
    monkeypatch.setattr(Pace, "is_due", lambda _: False)
    core.core.add_request(core.request(PROMPT))
    while not any(output.new_token_ids for output in core.core.step().outputs):
        pass
    assert core.stored._writes.has_jobs
    monkeypatch.setattr(core.runner, "execute_model", None)
    with pytest.raises(TypeError):
        core.core.step()
    core.core.shutdown()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_folder_has_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_store, "_LOCK_WAIT_S", 0.1)
    core = Core(folder)
    with pytest.raises(EngineStartError, match=r"--kv-cache-dir .* is in use by another server"):
        Core(folder)
    core.close()
    Core(folder).close()


def link(path: Path) -> None:
    (path.parent / "real").mkdir(0o700)
    path.symlink_to("real")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def short_secret(path: Path) -> None:
    secret = path.with_name(path.name + ".secret")
    secret.write_bytes(b"short")
    secret.chmod(0o600)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (link, "symbolic link"),
        (open_to_all, "permissions must be 700"),
        (Path.touch, "Not a directory"),
        (short_secret, "not one of 32 bytes"),
    ],
)
def test_what_is_not_ours_alone_ends_the_start(folder: Path, prepare: Callable[[Path], None], reason: str):
    prepare(folder)
    with pytest.raises(EngineStartError, match=reason):
        Core(folder)


def test_the_secret_lies_outside_for_its_owner_alone(folder: Path, written: list[int]):
    secret = folder.with_name("cache.secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    secret.unlink()
    core = Core(folder)
    assert core.ask() == (written, 0, 0), "without it the files cannot be read"
    core.close()


def test_work_keeps_to_its_share():
    now_s = 100.0
    pace = Pace(lambda: now_s, share=0.02)
    spent_s = 0.0
    while now_s < 200.0:
        if pace.is_due():
            pace.spend(0.01)
            spent_s += 0.01
        else:
            now_s += 0.1
    assert spent_s <= 0.02 * (200.0 - 100.0 + 10.0) + 0.01
    assert spent_s >= 0.02 * 100.0


def test_a_model_that_finds_no_prefixes_keeps_none_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture):
    found: Any = Core(folder)
    found.close()
    before = sorted(os.listdir(folder))
    config = EngineConfig(ModelRunnerConfig(""), kv_cache_dir=str(folder))
    spec = replace(SPEC, is_causal=False)
    stage = open_store.make_stored_prefixes(config, found.scheduler, found.runner, spec, found.core.ready)
    assert type(stage) is PrefixStage
    assert caplog.messages[-1] == f"--kv-cache-dir {folder}: the model is not causal, so that nothing is kept"
    assert sorted(os.listdir(folder)) == before
