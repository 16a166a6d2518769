"""Constrained requests through the engine core: any neighbours, preemption, scheduling ahead, drafts, slow grammars."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, SpeculativeConfig, build_engine_core
from llmstack_engine_core.structured_output import ConstrainedRows
from llmstack_engine_core.testing import EchoModelRunner
from llmstack_step_log import RecordedRun, RingSink
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerConfig,
    NewRequest,
    QuarantinedError,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    StructuredOutputsParams,
)

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
EOS = 1
VOCAB_SIZE = 200


class SpellingBackend:
    """Lets a request say exactly the text of its `regex`, a token per character; counts what it was asked."""

    slow: ClassVar[threading.Event] = threading.Event()

    def __init__(self, tokenizer_path: str, vocab_size: int) -> None:
        self.mask_bytes = -(-vocab_size // 32) * 4
        self.texts: dict[str, list[int]] = {}
        self.min_tokens: dict[str, int] = {}
        self.num_said: dict[str, int] = {}

    def expected_seconds(self, params: StructuredOutputsParams) -> float:
        return 60.0 if params.regex == "slow" else 0.0

    def compile(self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...]) -> None:
        if params.regex == "refused":
            raise InvalidRequestError("Refused.", param="structured_outputs.regex")
        if params.regex == "slow":
            assert self.slow.wait(30)

    def start(
        self, request_id: str, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], min_tokens: int = 0
    ) -> None:
        assert request_id not in self.texts
        self.texts[request_id] = [*map(ord, params.regex or ""), *eos_token_ids]
        self.num_said[request_id] = 0
        self.min_tokens[request_id] = min_tokens

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        text, start = self.texts[request_id], self.num_said[request_id]
        assert all(said == due for said, due in zip(token_ids, text[start:], strict=False))
        self.num_said[request_id] += len(token_ids)

    def masks(self, rows: Sequence[tuple[str, Sequence[int]]]) -> bytearray:
        bits = bytearray()
        for request_id, drafts in rows:
            text, start = self.texts[request_id], self.num_said[request_id]
            for place in range(1 + len(drafts)):
                is_said = list(drafts[:place]) == text[start : start + place]
                due = text[start + place : start + place + 1] if is_said else []
                bits += self._mask(due or range(VOCAB_SIZE))  # behind the end, what is said does not count
        return bits

    def _mask(self, token_ids: Sequence[int]) -> bytes:
        return sum(1 << token_id for token_id in token_ids).to_bytes(self.mask_bytes, "little")

    def end(self, request_id: str) -> None:
        del self.texts[request_id]


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spelling", SimpleNamespace(Backend=SpellingBackend))
    monkeypatch.setattr(SpellingBackend, "slow", threading.Event())


def build(num_blocks: int = 32, *, has_drafts: bool = False, **changes: Any) -> EngineCore:
    speculative = SpeculativeConfig("ngram", 3, prompt_lookup_max=2, prompt_lookup_min=1) if has_drafts else None
    config = EngineConfig(
        ModelRunnerConfig(f"echo?vocab_size={VOCAB_SIZE}", block_size=4, max_num_drafts=3 * has_drafts, **LIMITS),
        runner="echo",
        scheduler=SchedulerConfig(speculative=speculative, **LIMITS),
        num_blocks=num_blocks,
        tokenizer_path="",
        constraint_backend="spelling:Backend",
    )
    return build_engine_core(replace(config, **changes))


def request(request_id: str, text: str | None = None, num_prompt_tokens: int = 5, **params: Any) -> EngineCoreRequest:
    constraint = None if text is None else StructuredOutputsParams(regex=text)
    prompt = [ord("a") + index for index in range(num_prompt_tokens)]
    sampling_params = SamplingParams(**({"max_tokens": 16, "seed": 0} | params), structured_outputs=constraint)
    return EngineCoreRequest(request_id, prompt, sampling_params, eos_token_ids=(EOS,))


def run(core: EngineCore, max_steps: int = 2000) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("no end")


def said(outputs: list[EngineCoreOutput]) -> str:
    return "".join(chr(token_id) for output in outputs for token_id in output.new_token_ids)


def recorded(core: EngineCore) -> bytes:
    assert core.observers.step_log is not None
    assert isinstance(core.observers.step_log.sink, RingSink)
    return core.observers.step_log.sink.dump()


TEXTS = st.text("abcdexyz", max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.none() | TEXTS, st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(12, 40),
    st.sampled_from(["plain", "ahead", "drafts"]),
)
def test_each_request_says_its_text_whatever_runs_beside_it(
    shapes: list[tuple[str | None, int]], num_blocks: int, mode: str
) -> None:
    core = build(num_blocks, has_drafts=mode == "drafts", async_scheduling=mode == "ahead")
    for index, (text, num_prompt_tokens) in enumerate(shapes):
        core.add_request(request(f"r{index}", text, num_prompt_tokens))
    outputs = run(core)
    for index, (text, num_prompt_tokens) in enumerate(shapes):
        ended = outputs[f"r{index}"]
        if text is None:
            assert said(ended) == "".join(chr(ord("a") + place % num_prompt_tokens) for place in range(16))
            assert ended[-1].finish_reason is FinishReason.LENGTH
        else:
            assert said(ended) == text + chr(EOS)
            assert (ended[-1].finish_reason, ended[-1].stop_reason) == (FinishReason.STOP, None)
    assert core.stats().num_free_blocks == num_blocks
    core.shutdown()
    assert verify(RecordedRun(recorded(core))).num_requests == len(shapes)


def test_a_preempted_request_goes_on_in_its_text() -> None:
    core = build(num_blocks=8, enable_prefix_caching=False)
    for index in range(4):
        core.add_request(request(f"r{index}", "xyzxyzxyz", 6))
    outputs = run(core)
    assert core.stats().num_preemptions > 0
    assert {said(ended) for ended in outputs.values()} == {"xyzxyzxyz" + chr(EOS)}


@pytest.mark.parametrize("is_async", [False, True])
def test_others_overtake_a_request_whose_grammar_is_compiled(is_async: bool) -> None:
    core = build(async_scheduling=is_async)
    core.add_request(request("slow", "slow"))
    core.add_request(request("plain"))
    core.add_request(request("quick", "quick"))
    ended = set()
    while len(ended) < 2:
        ended |= {output.request_id for output in core.step().outputs if output.finish_reason is not None}
    assert ended == {"plain", "quick"}
    assert core.has_unfinished_requests()
    assert core.step().outputs == []
    assert core.stats().num_waiting == 1
    SpellingBackend.slow.set()
    assert said(run(core)["slow"]) == "slow" + chr(EOS)
    assert core.stats().num_waiting == 0


def test_many_grammars_that_take_long_hold_up_no_other_grammar() -> None:
    core = build()
    for index in range(8):
        core.add_request(request(f"slow{index}", "slow"))
    core.add_request(request("quick", "quick"))
    ended: list[str] = []
    while not ended:
        ended += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
    assert ended == ["quick"]
    core.abort_requests(f"slow{index}" for index in range(1, 8))
    SpellingBackend.slow.set()
    assert run(core).keys() == {"slow0"}


def test_a_request_is_aborted_while_its_grammar_is_compiled() -> None:
    core = build()
    core.add_request(request("slow", "slow"))
    core.step()
    core.abort_requests(["slow"])
    assert not core.has_unfinished_requests()
    core.add_request(request("slow", "abc"))
    SpellingBackend.slow.set()
    assert said(run(core)["slow"]) == "abc" + chr(EOS)


def test_an_aborted_request_is_followed_no_longer() -> None:
    core = build()
    core.add_request(request("gone", "xyzxyz"))
    core.add_request(request("stays", "xyzxyz"))
    while not core.step().outputs:
        pass
    core.abort_requests(["gone"])
    core.add_request(request("gone", "abc"))
    outputs = run(core)
    assert said(outputs["gone"]) == "abc" + chr(EOS)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_constraint_that_does_not_compile_ends_its_request_alone(is_async: bool) -> None:
    core = build(async_scheduling=is_async)
    core.add_request(request("refused", "refused"))
    core.add_request(request("good", "abc"))
    outputs = run(core)
    assert outputs["refused"][0].finish_reason is FinishReason.ERROR
    assert outputs["refused"][0].error == "Refused."
    assert said(outputs["good"]) == "abc" + chr(EOS)
    core.add_request(request("refused", "refused"))
    assert run(core)["refused"][0].error == "Refused."


def test_completions_of_one_prompt_share_its_blocks() -> None:
    core = build(enable_prefix_caching=False)
    core.add_request(request("0_a", "xy", 20))
    core.add_request(replace(request("1_a", "xy", 20), fork_of="0_a"))
    outputs = run(core)
    assert {said(ended) for ended in outputs.values()} == {"xy" + chr(EOS)}
    assert outputs["1_a"][0].num_cached_tokens > 0


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 10}])
def test_the_end_of_the_constraint_ends_the_request(params: dict[str, Any]) -> None:
    core = build()
    core.add_request(request("a", "xyz", **params))
    assert said(run(core)["a"]) == "xyz" + chr(EOS)


def test_without_a_tokenizer_a_constrained_request_is_refused() -> None:
    core = build(tokenizer_path=None)
    core.add_request(request("a", "xyz"))
    assert "tokenizer" in (run(core)["a"][0].error or "")


def test_without_the_backend_a_constrained_request_is_refused() -> None:
    core = build(constraint_backend="no_such_module:Backend")
    core.add_request(request("a", "xyz"))
    assert "no_such_module" in (run(core)["a"][0].error or "")


def test_a_step_without_constrained_rows_is_passed_on_as_it_is() -> None:
    calls: list[tuple[Any, ...]] = []

    class Watched(EchoModelRunner):
        def execute_model(self, *arguments: Any) -> Any:
            calls.append(arguments)
            return super().execute_model(*arguments)

    watched = Watched(ModelRunnerConfig(f"echo?vocab_size={VOCAB_SIZE}", block_size=4, **LIMITS))
    rows = ConstrainedRows(lambda: pytest.fail("there is nothing to follow"))
    step = SchedulerOutput(1, [NewRequest("a", [5, 6], 2, SamplingParams())], [ScheduledRequest("a", 0, 2, [0])], [], 2)
    rows.execute(watched.execute_model, step)
    assert calls == [(step,)]
    assert not rows.num_known_tokens


class FaultyBackend(SpellingBackend):
    """Fails in one of its methods for the requests whose text is `faulty`."""

    method: ClassVar[str] = ""

    def compile(self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...]) -> None:
        self._raise("compile", params.regex)

    def start(
        self, request_id: str, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], min_tokens: int = 0
    ) -> None:
        super().start(request_id, params, eos_token_ids, min_tokens)
        self._raise("start", params.regex)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        super().accept(request_id, token_ids)
        if self.num_said[request_id] >= 2:
            self._raise("accept", self._text(request_id))

    def masks(self, rows: Sequence[tuple[str, Sequence[int]]]) -> bytearray:
        for request_id, _ in rows:
            if self.num_said[request_id] >= 2:
                self._raise("masks", self._text(request_id))
        return super().masks(rows)

    def end(self, request_id: str) -> None:
        text = self._text(request_id)
        super().end(request_id)
        self._raise("end", text)

    def _text(self, request_id: str) -> str:
        return "".join(map(chr, self.texts[request_id][:-1]))

    def _raise(self, method: str, text: str | None) -> None:
        if method == self.method and text == "faulty":
            raise IndexError("a bug of the grammar library")


@pytest.mark.parametrize("mode", ["plain", "ahead", "drafts"])
@pytest.mark.parametrize("method", ["compile", "start", "accept", "masks"])
def test_a_grammar_that_fails_ends_its_request_alone_and_frees_its_blocks(
    method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spelling", SimpleNamespace(Backend=FaultyBackend))
    others = {"first": "abcdefgh", "last": "zyxwv"}

    def outputs_with(fault: str) -> dict[str, list[EngineCoreOutput]]:
        monkeypatch.setattr(FaultyBackend, "method", fault)
        core = build(has_drafts=mode == "drafts", async_scheduling=mode == "ahead")
        core.add_request(request("first", others["first"]))
        core.add_request(request("faulty", "faulty", 9))
        core.add_request(request("last", others["last"]))
        core.add_request(request("free"))
        outputs = run(core)
        assert core.stats().num_running == 0
        assert core.stats().num_free_blocks == core.stats().num_blocks
        return outputs

    good, bad = outputs_with(""), outputs_with(method)
    ended = bad.pop("faulty")[-1]
    assert (ended.finish_reason, ended.error) == (FinishReason.ERROR, QuarantinedError.NOT_CONSTRAINABLE)
    assert said(good.pop("faulty")) == "faulty" + chr(EOS)
    assert {name: said(ended) for name, ended in bad.items()} == {name: said(ended) for name, ended in good.items()}


def test_a_grammar_that_cannot_be_ended_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spelling", SimpleNamespace(Backend=FaultyBackend))
    monkeypatch.setattr(FaultyBackend, "method", "end")
    core = build()
    core.add_request(request("a", "faulty"))
    assert said(run(core)["a"]) == "faulty" + chr(EOS)
    core.add_request(request("b", "abc"))
    assert said(run(core)["b"]) == "abc" + chr(EOS)
    assert "could not be ended" in caplog.text


def test_the_blocks_of_a_request_whose_grammar_failed_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spelling", SimpleNamespace(Backend=FaultyBackend))
    monkeypatch.setattr(FaultyBackend, "method", "masks")
    core = build()
    core.add_request(request("bad", "faulty", 12))
    run(core)
    core.add_request(request("same", None, 12))
    run(core)
    assert core.stats().prefix_cache_hits == 0
