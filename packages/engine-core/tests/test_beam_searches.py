"""Beam searches as rows of a scheduler: over the real one, with a model that is a function of the text."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler
from llmstack_core_scheduler.protocols import DraftOwner
from llmstack_engine_core import SchedulerConfig
from llmstack_engine_core.beams import BeamSearch, BeamSearches, beam_searches
from llmstack_engine_core.build import make_stages
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.events import EventBus
from llmstack_engine_core.observers import Observers
from llmstack_engine_core.structured_output import LazyBackend
from llmstack_engine_core.testing import EchoOutput
from llmstack_step_log import LoggedScheduler, LogHeader, RecordedRun, RingSink, StepLog
from llmstack_step_log.control_plane import CacheConfig, build_cache
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)

VOCAB_SIZE, EOS = 11, 0
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def distribution(token_ids: list[int]) -> list[float]:
    rng = random.Random(repr(token_ids))
    weights = [rng.random() ** 3 + 1e-3 for _ in range(VOCAB_SIZE)]
    return [math.log(weight / sum(weights)) for weight in weights]


def choices(token_ids: list[int], num_choices: int) -> TokenLogprobs:
    logprobs = distribution(token_ids)
    best = sorted(range(VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])
    tops = best[:num_choices]
    return TokenLogprobs((best[0], *tops), (logprobs[best[0]], *(logprobs[one] for one in tops)), 1)


class TextRunner:
    """Greedy rows of a model whose next token depends on the whole text; keeps what each step computed."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.steps: list[dict[str, int]] = []
        self.failing: set[str] = set()

    def execute_model(self, scheduled: SchedulerOutput) -> EchoOutput:
        for new in scheduled.new_requests:
            self.texts[new.request_id] = list(new.token_ids)
            self.params[new.request_id] = new.sampling_params
        self.steps.append({row.request_id: row.num_scheduled_tokens for row in scheduled.scheduled_requests})
        rows = scheduled.scheduled_requests
        output = ModelRunnerOutput([row.request_id for row in rows], [], {}, {}, {})
        for row in rows:
            drafts = row.draft_token_ids or []
            text = self.texts[row.request_id]
            if row.request_id in self.failing:
                output.errors[row.request_id] = "made to fail"  # type: ignore[index]  # a dict, as made above
            if row.num_computed_tokens + row.num_scheduled_tokens < len(text) or row.request_id in self.failing:
                output.sampled_token_ids.append([])
                continue
            entries = self._sample(text, drafts, self.params[row.request_id].logprobs or 0)
            output.sampled_token_ids.append([entry.token_ids[0] for entry in entries])
            output.logprobs[row.request_id] = entries  # type: ignore[index]  # a dict, as made above
        return EchoOutput(output)

    def _sample(self, text: list[int], drafts: list[int], num_choices: int) -> list[TokenLogprobs]:
        """One token, and one more for each draft that was right."""
        entries = []
        for draft in [*drafts, None]:
            entries.append(choices(text, num_choices))
            text.append(entries[-1].token_ids[0])
            if text[-1] != draft:
                break
        return entries

    def shutdown(self) -> None:
        """There is nothing to release."""


class Rig:
    """An engine core over `TextRunner`, whose log is kept."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        is_async: bool = False,
        has_cache: bool = True,
        draft_source: Any = None,
        **limits: Any,
    ) -> None:
        config = SchedulerConfig(**({"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64} | limits))
        cache = CacheConfig(num_blocks, 4, has_cache)
        self.sink = RingSink(1 << 22)
        self.log = StepLog(LogHeader.of(config, cache, {}), self.sink)
        scheduler = Scheduler(config, build_cache(cache), draft_source=draft_source)
        self.runner = TextRunner()
        ready = EngineReady(num_blocks, 4, 64, VOCAB_SIZE, "float32", "cpu")
        events, logged = EventBus((), time.monotonic), LoggedScheduler(scheduler, self.log)
        stages = make_stages(logged, self.runner, events, LazyBackend("", None, VOCAB_SIZE))  # type: ignore[arg-type]
        self.core = EngineCore(
            logged, self.runner, ready, stages, Observers(events, step_log=self.log), num_steps_under_way=1 + is_async  # type: ignore[arg-type]
        )  # fmt: skip
        assert isinstance(stages.beams, BeamSearches)
        self.searches = stages.beams
        self.outputs: dict[str, EngineCoreOutput] = {}

    def add(self, name: str, width: int, **fields: Any) -> list[EngineCoreRequest]:
        made = requests(name, width, **fields)
        for request in made:
            self.core.add_request(request)
        return made

    def step(self) -> None:
        for output in self.core.step().outputs:
            assert output.finish_reason is not None, "a search tells nothing before its end"
            assert output.request_id not in self.outputs
            self.outputs[output.request_id] = output

    def finish(self) -> None:
        for _ in range(2000):
            if not self.core.has_unfinished_requests():
                break
            self.step()
        assert not self.core.has_unfinished_requests()
        assert self.core.stats().num_free_blocks == self.core.stats().num_blocks
        assert not self.searches.request_id_to_search
        assert not self.searches.row_id_to_search

    def beams(self, name: str, width: int) -> list[list[int]]:
        ids = [name] if width == 1 else [f"{index}_{name}" for index in range(width)]
        assert all(self.outputs[one].error is None for one in ids), self.outputs
        return [self.outputs[one].new_token_ids for one in ids]


def requests(
    name: str, width: int, prompt: list[int] | None = None, max_tokens: int = 6, **params: Any
) -> list[EngineCoreRequest]:
    sampling_params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, seed=1, **params)
    first = name if width == 1 else f"0_{name}"
    request = EngineCoreRequest(first, list(prompt or PROMPT), sampling_params, (EOS,))
    others = [replace(request, request_id=f"{index}_{name}", fork_of=first) for index in range(1, width)]
    return [request, *others]


def expected(request: EngineCoreRequest) -> list[list[int]]:
    """The same search without a scheduler."""
    search = BeamSearch(request)
    while not search.is_over:
        prompt = request.prompt_token_ids
        search.advance([choices([*prompt, *beam.token_ids], search.num_choices) for beam in search.running])
    return [list(complete.beam.token_ids) for complete in search.complete]


def test_a_step_computes_one_token_of_each_beam_of_every_search():
    rig = Rig()
    one = rig.add("a", 4, ignore_eos=True)
    other = rig.add("b", 2, prompt=[7, 7], ignore_eos=True)
    rig.finish()
    assert rig.beams("a", 4) == expected(one[0])
    assert rig.beams("b", 2) == expected(other[0])
    assert [sorted(step.values()) for step in rig.runner.steps if step] == [[2, 8], *[[1] * 6] * 5]


def test_results_come_best_first_with_reason_and_logprobs():
    rig = Rig()
    request = rig.add("a", 3, logprobs=1, max_tokens=9)[0]
    rig.finish()
    assert rig.beams("a", 3) == expected(request)
    outputs = [rig.outputs[f"{index}_a"] for index in range(3)]
    for output in outputs:
        assert [entry.token_ids[0] for entry in output.logprobs or []] == output.new_token_ids
        assert output.finish_reason is (FinishReason.STOP if output.new_token_ids[-1] == EOS else FinishReason.LENGTH)
        assert output.num_cached_tokens == 0


@settings(max_examples=60)
@given(
    st.integers(0, 10**6), st.integers(5, 24), st.sampled_from([2, 3, 16]), st.sampled_from([4, 9, 64]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_preemption_few_rows_and_chunks_change_no_result(
    seed: int, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int, is_async: bool, has_cache: bool
):
    rng = random.Random(seed)
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs)}
    rig = Rig(num_blocks, is_async=is_async, has_cache=has_cache, **limits)
    wanted = {}
    for name in "abc":
        width = rng.randint(1, 4)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        added = rig.add(name, width, prompt=prompt, max_tokens=rng.randint(1, 9), length_penalty=rng.choice([0.0, 1.0]))
        wanted[name] = width, expected(added[0])
        for _ in range(rng.randint(0, 3)):
            rig.step()
    rig.finish()
    for name, (width, beams) in wanted.items():
        assert rig.beams(name, width) == beams
    rig.core.shutdown()
    assert verify(RecordedRun(rig.sink.dump())).num_steps == rig.core.stats().step


class Prophet:
    """Drafts that are always right."""

    def propose(self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner) -> list[int]:
        text = list(token_ids)
        for _ in range(max_num_tokens):
            text.append(choices(text, 1).token_ids[0])
        return text[len(token_ids) :]

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """There is nothing to learn."""

    def forget(self, request_id: str) -> None:
        """It keeps nothing."""


@pytest.mark.parametrize("is_drafting_for_beams", [False, True])
def test_beams_are_not_drafted_for_and_drafts_would_change_no_result(
    is_drafting_for_beams: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_drafting_for_beams:  # as a scheduler does that knows nothing of beams
        make_row = beam_searches._Search.make_row

        def make_plain_row(search: Any, beam: Any) -> EngineCoreRequest:
            row = make_row(search, beam)
            return replace(row, sampling_params=replace(row.sampling_params, use_beam_search=False))

        monkeypatch.setattr(beam_searches._Search, "make_row", make_plain_row)
    rig = Rig(draft_source=Prophet(), num_lookahead_slots=3)
    request = rig.add("a", 3, max_tokens=9, ignore_eos=True)[0]
    rig.finish()
    assert rig.beams("a", 3) == expected(request)
    assert bool(rig.core.stats().num_draft_tokens) is is_drafting_for_beams


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_abort_of_all_its_requests_ends_a_search_and_leaves_nothing(num_steps: int):
    rig = Rig()
    rig.add("a", 3, ignore_eos=True)
    rig.add("b", 2, ignore_eos=True)
    for _ in range(num_steps):
        rig.step()
    rig.core.abort_requests(["0_a", "1_a", "2_a", "nobody"])
    rig.finish()
    assert sorted(rig.outputs) == ["0_b", "1_b"]
    assert all(name.startswith("0_b") for step in rig.runner.steps[num_steps:] for name in step)


def test_who_has_left_gets_no_result_and_the_others_get_theirs():
    rig = Rig()
    request = rig.add("a", 3)[0]
    rig.step()
    rig.core.abort_requests(["1_a"])
    rig.finish()
    assert {name: output.new_token_ids for name, output in rig.outputs.items()} == {
        "0_a": expected(request)[0],
        "2_a": expected(request)[2],
    }


def test_a_search_waits_for_the_last_of_its_requests():
    rig = Rig()
    first, second = requests("a", 2)
    rig.core.add_request(first)
    assert not rig.core.has_unfinished_requests()
    rig.core.add_request(second)
    rig.finish()
    assert rig.beams("a", 2) == expected(first)


def test_a_request_whose_search_is_gone_or_complete_is_refused():
    rig = Rig()
    first, second = requests("a", 2)
    with pytest.raises(InvalidRequestError, match="gone"):
        rig.searches.hold(second)
    rig.searches.hold(first)
    rig.searches.hold(second)
    with pytest.raises(InvalidRequestError, match="has all its beams"):
        rig.searches.hold(replace(second, request_id="2_a"))


def test_a_search_that_cannot_fit_is_refused_and_leaves_nothing():
    rig = Rig()
    first, second = requests("a", 2, prompt=[1] * 100)
    rig.searches.hold(first)
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        rig.searches.hold(second)
    rig.finish()


def test_a_beam_that_fails_ends_its_search_alone():
    rig = Rig()
    rig.add("a", 3, ignore_eos=True)
    other = rig.add("b", 2)
    rig.step()
    rig.step()
    rig.runner.failing.add(next(name for name in rig.runner.steps[-1] if name.startswith("0_a")))
    rig.runner.failing |= {f"0_a/beam-{number}" for number in range(9)}
    rig.finish()
    assert rig.beams("b", 2) == expected(other[0])
    for index in range(3):
        assert rig.outputs[f"{index}_a"].finish_reason is FinishReason.ERROR
        assert rig.outputs[f"{index}_a"].error == "made to fail"


def test_a_row_name_that_a_user_has_taken_fails_the_search_not_the_engine():
    rig = Rig()
    rig.core.add_request(EngineCoreRequest("0_a/beam-2", [5], SamplingParams(max_tokens=30, seed=0)))
    rig.add("a", 2)
    for _ in range(3):
        for output in rig.core.step().outputs:
            rig.outputs[output.request_id] = output
    assert rig.outputs["0_a"].finish_reason is rig.outputs["1_a"].finish_reason is FinishReason.ERROR


def test_more_beams_than_there_are_sequences_are_an_error_and_no_wait():
    rig = Rig()
    rig.add("a", 12, max_tokens=1)
    rig.finish()
    assert "fewer answers that are allowed" in (rig.outputs["11_a"].error or "")
