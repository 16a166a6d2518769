"""Custom logits processors: notification, order of application, and loading."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from model_runner_helpers.sampling_rows import make_sampling_rows

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.sampling import (
    AddedRow,
    LogitsProcessorError,
    LogitsProcessors,
    LogitsRows,
    Sampler,
    load_logits_processors,
    logits_processor,
    target_probabilities,
)
from llmstack_model_runner.testing import write_gpt2_config
from llmstack_types import (
    ModelRunnerConfig,
    NewRequest,
    QuarantinedError,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

VOCAB_SIZE = 12


class ForceToken:
    """Lets a request that says `force` take that token only."""

    is_invariant = False

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.forced = np.full(max_num_rows, -1)
        self.notified: list[tuple[list[int], list[int]]] = []
        self.seen: list[tuple[list[int], list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        return self.is_invariant

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        self.notified.append((list(removed), [one.row for one in added]))
        self.forced[list(removed)] = -1
        for one in added:
            self.forced[one.row] = (one.params.extra_args or {}).get("force", -1)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        self.seen.append((rows.rows.tolist(), rows.num_output_tokens.tolist()))
        forced = torch.from_numpy(self.forced[rows.rows])
        index = (forced >= 0).nonzero().squeeze(-1)
        kept = logits[index, forced[index]]
        logits[index] = -torch.inf
        logits[index, forced[index]] = kept
        return logits


class Flatten(ForceToken):
    """Halves logits, which leaves the most likely token where it is."""

    is_invariant = True

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        self.seen.append((rows.rows.tolist(), rows.num_output_tokens.tolist()))
        self.largest = logits.amax(dim=-1).tolist()
        return logits / 2


class Wrong(ForceToken):
    """Returns logits of another shape."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits[:, :-1]


def make(processor_class: type[ForceToken]) -> tuple[ForceToken, LogitsProcessors]:
    processor = processor_class(8, VOCAB_SIZE, torch.device("cpu"))
    return processor, LogitsProcessors([processor])


def test_a_processor_sees_the_rows_of_the_logits_in_their_order() -> None:
    processor, processors = make(ForceToken)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1, extra_args={"force": 4})]
    rows = make_sampling_rows(params, [[0, 1], [0, 1]], VOCAB_SIZE, processors=processors)
    metadata = rows.metadata(np.array([1, 0]), np.array([1, 1]))
    output = Sampler().sample(torch.zeros(2, VOCAB_SIZE), metadata)
    assert output.token_ids.tolist() == [4, 0]
    assert processor.seen == [([1, 0], [1, 1])]


def test_processors_are_notified_once_of_removals_then_additions() -> None:
    processor, processors = make(ForceToken)
    rows = make_sampling_rows([SamplingParams()] * 2, [[0], [0]], VOCAB_SIZE, processors=processors)
    index, indices = np.arange(2), np.zeros(2, dtype=np.int64)
    rows.metadata(index, indices)
    rows.metadata(index, indices)
    rows.clear_row(1)
    rows.set_row(1, SamplingParams(extra_args={"force": 3}), np.array([0]), 1)
    rows.metadata(index, indices)
    rows.clear_row(0)
    rows.metadata(np.array([1]), np.array([0]))
    assert processor.notified == [([], [0, 1]), ([1], [1]), ([0], [])]
    assert processor.forced[1] == 3


def test_a_request_that_left_before_any_step_is_not_mentioned() -> None:
    processor, processors = make(ForceToken)
    rows = make_sampling_rows([SamplingParams()], [[0]], VOCAB_SIZE, processors=processors)
    rows.clear_row(0)
    rows.metadata(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert processor.notified == []


def test_a_processor_watches_the_tokens_grow_but_cannot_change_them() -> None:
    added: list[AddedRow] = []

    class Watch(ForceToken):
        def update_state(self, removed: Sequence[int], added_rows: Sequence[AddedRow]) -> None:
            added.extend(added_rows)

    _, processors = make(Watch)
    rows = make_sampling_rows([SamplingParams()], [[5, 6, 7]], VOCAB_SIZE, num_prompt_tokens=2, processors=processors)
    rows.metadata(np.array([0]), np.array([1]))
    assert (added[0].num_prompt_tokens, added[0].token_ids[:3].tolist()) == (2, [5, 6, 7])
    with pytest.raises(ValueError, match="read-only"):
        added[0].token_ids[0] = 1


def test_a_processor_that_keeps_the_maximum_is_applied_to_random_rows_after_temperature() -> None:
    processor, processors = make(Flatten)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1, temperature=0.5)]
    rows = make_sampling_rows(params, [[0], [0]], VOCAB_SIZE, processors=processors)
    logits = torch.randn(2, VOCAB_SIZE)
    metadata = rows.metadata(np.arange(2), np.zeros(2, dtype=np.int64))
    found = target_probabilities(logits, metadata)
    assert processor.seen == [([1], [0])]
    assert processor.largest == [0.0]  # type: ignore[attr-defined]  # the class sets it
    torch.testing.assert_close(found[1], logits[1].softmax(dim=-1))  # halved at temperature 0.5
    assert found[0].tolist() == torch.nn.functional.one_hot(logits[0].argmax(), VOCAB_SIZE).tolist()


def test_penalties_come_after_a_processor() -> None:
    _, processors = make(ForceToken)
    params = SamplingParams(temperature=0.0, extra_args={"force": 4}, presence_penalty=2.0, logprobs=0)
    rows = make_sampling_rows([params], [[0, 4]], VOCAB_SIZE, processors=processors)
    output = Sampler("processed_logprobs").sample(
        torch.zeros(1, VOCAB_SIZE), rows.metadata(np.array([0]), np.array([1]))
    )
    assert output.token_ids.tolist() == [4]
    assert output.logprobs is not None
    assert output.logprobs.chosen_logprobs.tolist() == [0.0]


def test_a_processor_that_returns_another_shape_is_named() -> None:
    _, processors = make(Wrong)
    rows = make_sampling_rows([SamplingParams()], [[0]], VOCAB_SIZE, processors=processors)
    with pytest.raises(LogitsProcessorError, match=r"Wrong returned .* \[1, 11\]"):
        Sampler().sample(torch.zeros(1, VOCAB_SIZE), rows.metadata(np.array([0]), np.array([0])))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ForceToken", "module:Class"),
        (":ForceToken", "module:Class"),
        ("no_such_module:Class", "cannot be imported"),
        ("math:sqrt", "lacks is_argmax_invariant, update_state, apply"),
        ("math:Nothing", "lacks"),
    ],
)
def test_a_name_that_is_no_processor_is_refused(name: str, text: str) -> None:
    with pytest.raises(LogitsProcessorError, match=text):
        load_logits_processors([name])


@pytest.fixture
def module_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """This module under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "processors_of_a_test", sys.modules[__name__])
    return "processors_of_a_test"


def test_installed_processors_come_first(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, f"{module_name}:{name}", "group") for name in ("Wrong", "Flatten")]
    monkeypatch.setattr(logits_processor, "entry_points", lambda group: entries)
    assert load_logits_processors([f"{module_name}:ForceToken"]) == [Flatten, Wrong, ForceToken]


def test_a_runner_applies_the_processors_of_its_configuration(tmp_path: Path, module_name: str) -> None:
    config = ModelRunnerConfig(
        str(write_gpt2_config(tmp_path)),
        load_format="dummy",
        max_model_len=32,
        device="cpu",
        logits_processors=(f"{module_name}:ForceToken",),
    )
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(num_blocks=8)
    params = SamplingParams(seed=1, extra_args={"force": 7})
    requests = [NewRequest("a", [1, 2], 2, params), NewRequest("b", [1, 2], 2, SamplingParams(temperature=0.0))]
    scheduled = [ScheduledRequest("b", 0, 2, [1]), ScheduledRequest("a", 0, 2, [2])]
    first = runner.execute_model(SchedulerOutput(0, requests, scheduled)).result()
    second = runner.execute_model(SchedulerOutput(1, [], [ScheduledRequest("a", 2, 1, [])])).result()
    assert (first.sampled_token_ids[1], second.sampled_token_ids) == ([7], [[7]])
    assert first.sampled_token_ids[0] != [7]


def test_a_runner_without_the_processor_it_is_to_use_does_not_start(tmp_path: Path) -> None:
    config = ModelRunnerConfig(str(write_gpt2_config(tmp_path)), load_format="dummy", logits_processors=("no_such:X",))
    with pytest.raises(ValueError, match="no_such"):
        ModelRunner(config).load_model()


class FailsAtWord(ForceToken):
    """Fails for requests that say `fail`, in the method that they name; what it forces is not affected."""

    def update_state(self, removed: Sequence[int], added: Sequence[AddedRow]) -> None:
        super().update_state(removed, added)
        self.failing = getattr(self, "failing", set()) - set(removed)
        for one in added:
            if (one.params.extra_args or {}).get("fail") == "update_state":
                raise KeyError("no such rule")
            if (one.params.extra_args or {}).get("fail") == "apply":
                self.failing.add(one.row)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        changed = super().apply(logits, rows)
        if self.failing & set(rows.rows.tolist()):
            raise KeyError("no such rule")
        return changed


@pytest.mark.parametrize("method", ["update_state", "apply"])
def test_a_processor_that_fails_at_one_request_ends_that_one_alone(
    method: str, tmp_path: Path, module_name: str
) -> None:
    config = ModelRunnerConfig(
        str(write_gpt2_config(tmp_path)),
        load_format="dummy",
        max_model_len=32,
        device="cpu",
        logits_processors=(f"{module_name}:FailsAtWord",),
    )
    runner = ModelRunner(config)
    runner.load_model()

    def run(fail: str) -> tuple[dict[str, list[int]], dict[str, str]]:
        runner.initialize_kv_cache(num_blocks=8)
        extra_args = {"a": {"force": 7}, "b": {"fail": fail}, "c": {"force": 9}, "d": {}}
        tokens: dict[str, list[int]] = {name: [] for name in extra_args}
        requests = [
            NewRequest(name, [1, index], 2, SamplingParams(seed=index, extra_args=extra))
            for index, (name, extra) in enumerate(extra_args.items())
        ]
        rows = [ScheduledRequest(name, 0, 2, [index + 1]) for index, name in enumerate(extra_args)]
        first = runner.execute_model(SchedulerOutput(0, requests, rows)).result()
        others = [ScheduledRequest(name, 2, 1, []) for name in "acd"]
        second = runner.execute_model(SchedulerOutput(1, [], others, removed_request_ids=["b"])).result()
        for output in (first, second):
            for name, sampled in zip(output.request_ids, output.sampled_token_ids, strict=True):
                tokens[name] += sampled
        return tokens, dict(first.errors) | dict(second.errors)

    expected, no_errors = run("")
    tokens, errors = run(method)
    assert no_errors == {}
    assert errors == {"b": QuarantinedError.NOT_COMPUTABLE}
    assert tokens.pop("b") == []
    del expected["b"]
    assert tokens == expected
