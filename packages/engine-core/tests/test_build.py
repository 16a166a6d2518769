"""The start: sizes, refusals in one line, and what the first message says."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest

from llmstack_engine_core import EngineConfig, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_engine_core.build import choose_drafts, choose_limits, resolve_async_scheduling
from llmstack_engine_core.plugins import load_model_runner
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_kv_cache.session_order import SessionOrder
from llmstack_types import EngineCoreRequest, EngineStartError, ModelRunnerConfig, SamplingParams

BYTES_PER_BLOCK = 128


def config(path: str = "echo", max_model_len: int = 256, max_num_seqs: int = 4, **changes: object) -> EngineConfig:
    return EngineConfig(
        ModelRunnerConfig(path, max_model_len=max_model_len, max_num_seqs=max_num_seqs),
        scheduler=SchedulerConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs),
        **{"runner": "echo", **changes},
    )


def start_error(config: EngineConfig) -> str:
    with pytest.raises(EngineStartError) as caught:
        build_engine_core(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_first_message_describes_the_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another package's tests may have imported it
    ready = build_engine_core(config(num_blocks=20)).ready
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (20, 16, 256)
    assert (ready.vocab_size, ready.dtype, ready.device) == (50_257, "float32", "cpu")
    assert ready.kv_cache_bytes == 20 * BYTES_PER_BLOCK
    assert ready.pid > 0
    assert list(ready.phases_s) == [
        "import_runner", "load_model", "size_kv_cache", "initialize_kv_cache", "build_scheduler",
    ]  # fmt: skip
    assert ready.backends == {"echo": "python"}
    assert "python" in ready.versions
    assert "torch" not in ready.versions


def test_a_model_without_keys_and_values_has_room_for_the_tokens_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder keeps nothing of its prompts, and so has no group of layers."""
    whole = EchoModelRunner.kv_cache_spec
    monkeypatch.setattr(EchoModelRunner, "kv_cache_spec", lambda runner: replace(whole(runner), groups=()))
    ready = build_engine_core(config(num_blocks=20, max_model_len=64)).ready
    assert ready.num_kv_tokens == 20 * 16


@pytest.mark.parametrize(
    ("asked", "device", "num_drafts", "expected"),
    [
        (None, "cpu", 0, False),
        (None, "cuda", 0, True),
        (None, "cuda", 2, False),
        (False, "cuda", 0, False),
        (True, "cpu", 0, True),
    ],
)
def test_steps_are_scheduled_ahead_where_a_gpu_computes_by_itself(
    asked: bool | None, device: str, num_drafts: int, expected: bool
) -> None:
    speculative = SpeculativeConfig("ngram", num_drafts) if num_drafts else None
    given = EngineConfig(
        ModelRunnerConfig("echo", max_num_drafts=num_drafts),
        scheduler=SchedulerConfig(speculative=speculative),
        async_scheduling=asked,
    )
    assert resolve_async_scheduling(given, device) is expected


def test_the_first_message_says_what_keys_and_values_are_stored_in_and_whether_steps_are_scheduled_ahead() -> None:
    ready = build_engine_core(config(async_scheduling=True)).ready
    assert (ready.kv_cache_dtype, ready.async_scheduling) == ("float32", True)
    assert build_engine_core(config()).ready.async_scheduling is False


def test_the_cache_takes_the_bytes_it_was_given() -> None:
    ready = build_engine_core(config(kv_cache_bytes=100 * BYTES_PER_BLOCK + 5)).ready
    assert ready.num_blocks == 100


def test_sessions_tell_what_is_evicted_where_that_is_asked_for() -> None:
    for is_asked in (False, True):
        core = build_engine_core(config(session_eviction=is_asked, step_log_bytes=0))
        core.add_request(EngineCoreRequest("a", list(range(60)), SamplingParams(max_tokens=1, ignore_eos=True)))
        for _ in range(3):
            core.step()
        sessions = core._scheduler.kv_cache_manager.sessions
        assert (sessions.num_turns, isinstance(sessions, SessionOrder)) == (is_asked, is_asked)
    text = start_error(config("echo?sliding_window=8", session_eviction=True))
    assert text.startswith("--session-eviction is for models without sliding windows")


def test_the_hosts_share_may_be_given_in_bytes() -> None:
    core = build_engine_core(config(num_blocks=20, host_kv_bytes=7 * BYTES_PER_BLOCK + 1))
    assert core.stats().num_host_blocks == 7
    with pytest.raises(ValueError, match="num_host_blocks and host_kv_bytes"):
        config(num_host_blocks=1, host_kv_bytes=1)


def test_a_default_cache_is_what_the_device_has_but_not_more_than_is_useful() -> None:
    assert build_engine_core(config("echo?num_available_blocks=50")).ready.num_blocks == 50
    assert build_engine_core(config("echo?num_available_blocks=5000")).ready.num_blocks == 2 * 4 * 16


def test_too_many_blocks_are_refused_with_the_bytes_and_the_flag() -> None:
    text = start_error(config("echo?num_available_blocks=50", num_blocks=51))
    for part in ("out of memory", str(51 * BYTES_PER_BLOCK), str(50 * BYTES_PER_BLOCK), "--num-kv-blocks"):
        assert part in text
    assert "--kv-cache-memory-bytes" in start_error(config("echo?num_available_blocks=50", kv_cache_bytes=10**9))


def test_a_cache_without_a_block_is_refused() -> None:
    assert "one block" in start_error(config("echo?num_available_blocks=0"))
    assert "--kv-cache-memory-bytes" in start_error(config(kv_cache_bytes=BYTES_PER_BLOCK - 1))


def test_a_default_length_is_lowered_to_what_the_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert build_engine_core(config(num_blocks=10)).ready.max_model_len == 160
    assert "lowered from 256 to 160" in caplog.text


def test_a_length_the_user_asked_for_is_not_lowered() -> None:
    text = start_error(config(num_blocks=10, is_max_model_len_explicit=True))
    assert "--max-model-len to 160" in text
    assert "16 blocks" in text
    assert text.endswith("raise --num-kv-blocks")
    by_size = config(kv_cache_bytes=10 * BYTES_PER_BLOCK, is_max_model_len_explicit=True)
    assert start_error(by_size).endswith("raise --kv-cache-memory-bytes")


class NoMemory(EchoModelRunner):
    num_shutdowns = 0

    def initialize_kv_cache(self, num_blocks: int) -> None:
        raise MemoryError

    def shutdown(self) -> None:
        NoMemory.num_shutdowns += 1


def test_a_failed_allocation_is_one_line_and_releases_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmstack_engine_core.build.load_model_runner", lambda name: NoMemory)
    assert "out of memory" in start_error(config())
    assert NoMemory.num_shutdowns == 1


@pytest.mark.parametrize(
    ("runner", "part"),
    [
        ("nonesuch", "there is no model runner 'nonesuch'; known are default, echo"),
        ("no_such_module:Runner", "cannot be imported: No module named 'no_such_module'"),
        ("llmstack_engine_core.testing:Nothing", "is not a model runner class"),
        ("llmstack_engine_core.testing:EchoOptions", "it lacks load_model"),
        ("llmstack_engine_core.testing:fake_logprobs", "is not a model runner class"),
    ],
)
def test_a_runner_that_is_none_is_refused_in_a_sentence(runner: str, part: str) -> None:
    assert part in start_error(config(runner=runner))


def test_a_runner_can_be_named_by_module_and_class() -> None:
    core = build_engine_core(config(runner="llmstack_engine_core.testing:EchoModelRunner"))
    assert core.ready.backends == {"echo": "python"}


def test_phases_before_the_construction_are_reported_with_it() -> None:
    before_s = {"import_engine_core": 1.0, "import_runner": 2.0}
    phases_s = build_engine_core(config(num_blocks=20), phases_s=before_s).ready.phases_s
    assert [*phases_s][:3] == ["import_engine_core", "import_runner", "load_model"]
    assert phases_s["import_engine_core"] == 1.0
    assert phases_s["import_runner"] >= 2.0
    assert before_s["import_runner"] == 2.0


def test_a_runner_of_our_own_is_found_without_a_search_of_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(**_: str) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("importlib.metadata.entry_points", search)
    assert load_model_runner("echo") is EchoModelRunner
    with pytest.raises(AssertionError, match="searched"):
        load_model_runner("foreign")


@pytest.mark.parametrize(("linear", "variant"), [("native (avx2)", "avx2"), ("cpu", ""), ("triton (cuda)", "")])
def test_adaptive_drafts_know_the_costs_of_the_native_variant(linear: str, variant: str) -> None:
    config = SchedulerConfig(speculative=SpeculativeConfig("ngram", 6, is_adaptive=True))
    speculative = choose_drafts(config, {"linear": linear}, step_bytes=1000).speculative
    assert speculative is not None
    assert (speculative.variant, speculative.step_bytes) == (variant, 1000)
    fixed = SchedulerConfig(speculative=SpeculativeConfig("ngram", 6))
    assert choose_drafts(fixed, {"linear": linear}) == fixed


@pytest.mark.parametrize(
    ("quantization", "variant"),
    [
        ("int4", "avx2 quantized"),
        ("gguf of the checkpoint", "avx2 quantized"),
        ("int4, widened again, which saves neither memory nor time", "avx2"),
        ("", "avx2"),
    ],
)
def test_weights_of_few_bits_have_other_costs_of_drafts(quantization: str, variant: str) -> None:
    config = SchedulerConfig(speculative=SpeculativeConfig("ngram", 6, is_adaptive=True))
    backends = {"linear": "native (avx2)", "quantization": quantization}
    speculative = choose_drafts(config, backends).speculative
    assert speculative is not None
    assert speculative.variant == variant


def test_long_prompts_let_no_others_go_first_where_a_model_has_states() -> None:
    runner = EchoModelRunner(ModelRunnerConfig("echo"))
    runner.load_model()
    spec, asked = runner.kv_cache_spec(), SchedulerConfig(shorter_prompts_first=True)
    assert choose_limits(asked, spec, {}).shorter_prompts_first
    with_states = replace(spec, groups=(*spec.groups, replace(spec.groups[0], layers=(1,), kind="state")))
    with pytest.raises(EngineStartError, match="--shorter-prompts-first is for models without layers with a state"):
        choose_limits(asked, with_states, {})
    assert not choose_limits(asked, replace(spec, is_causal=False), {}).shorter_prompts_first
