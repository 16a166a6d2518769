"""Drafts are verified in captured steps by the device's sampler, and no token or log-probability depends on them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_runner_helpers import device_runners
from model_runner_helpers.cpu_stand_in import CpuStandIn
from model_runner_helpers.device_runners import GREEDY, NUM_BLOCKS, needs_native_kernels, start

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of, write_random_adapter, write_random_weights
from llmstack_types import (
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    TokenMasks,
)

pytestmark = needs_native_kernels
folder = device_runners.folder

MAX_NUM_DRAFTS = 3
VOCAB_SIZE = 97
ON_DEVICE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "top_k": 5, "min_p": 0.01},
    {"temperature": 1.0, "seed": 6, "top_k": 4, "min_tokens": 9, "stop_token_ids": tuple(range(16))},
)
WITH_LOGITS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 1.0, "seed": 8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.8},
    {"temperature": 0.0, "logit_bias": {6: 1.0}, "bad_words_token_ids": ((7, 8),)},
)


@pytest.fixture(scope="module")
def plain(folder: Path) -> ModelRunner:
    return start(folder, CpuStandIn(), max_num_seqs=10)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> ModelRunner:
    return start(folder, CpuStandIn(), max_num_seqs=10, max_num_drafts=MAX_NUM_DRAFTS)


@pytest.fixture
def eager(drafting: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps of the drafting runner that replay no graph."""
    return note_eager_steps(drafting, monkeypatch)


def note_eager_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: Any = runner._steps
    noted: list[int] = []
    run_eagerly = steps._run_eagerly

    def note_and_run(step: Any, *rest: Any) -> Any:
        noted.append(len(step.rows))
        return run_eagerly(step, *rest)

    monkeypatch.setattr(steps, "_run_eagerly", note_and_run)
    return noted


class Replay:
    """Requests with what they are known to say, of which drafts are right or wrong by chance."""

    def __init__(self, runner: ModelRunner, params: Sequence[Mapping[str, Any]], num_outputs: int = 16) -> None:
        self.driver = StepDriver(runner, NUM_BLOCKS)
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self._num_outputs = num_outputs
        for index, values in enumerate(params):
            self.driver.add(f"{index}", [index + 1, *range(index)], SamplingParams(**values))

    def texts(self) -> dict[str, list[int]]:
        return {name: outputs[: self._num_outputs] for name, outputs in self.driver.outputs.items()}

    def run(self, known: Mapping[str, Sequence[int]], draw: random.Random) -> None:
        """Prompts in chunks, then decodes with up to `MAX_NUM_DRAFTS` drafts each, until all have their outputs."""
        driver = self.driver
        while names := [name for name, outputs in driver.outputs.items() if len(outputs) < self._num_outputs]:
            lefts = {name: driver.num_left(name) for name in names if draw.random() < 0.8}
            tokens = {name: left if left == 1 else draw.randint(1, left) for name, left in lefts.items()}
            drafts = {name: self._guess(name, known, draw) for name, num in tokens.items() if num == lefts[name]}
            drafts = {name: guesses for name, guesses in drafts.items() if guesses}
            output = driver.step(tokens, drafts)
            for name, entries in output.logprobs.items():
                self.logprobs.setdefault(name, []).extend(entries)

    def _guess(self, name: str, known: Mapping[str, Sequence[int]], draw: random.Random) -> list[int]:
        done = len(self.driver.outputs[name])
        if not known or not done:
            return []
        right = known[name][done : done + draw.randint(0, MAX_NUM_DRAFTS)]
        return [token if draw.random() < 0.8 else draw.randrange(VOCAB_SIZE) for token in right]

    def end(self) -> None:
        for name in self.driver.outputs:
            self.driver.remove(name)
        self.driver.step({})


@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logprobs_are_those_without_drafts(plain: ModelRunner, drafting: ModelRunner, seed: int) -> None:
    params = [*ON_DEVICE, *WITH_LOGITS]
    expected, found = Replay(plain, params), Replay(drafting, params)
    expected.run({}, random.Random(seed))
    found.run(expected.texts(), random.Random(seed))
    assert found.driver.errors == expected.driver.errors == {}
    assert found.texts() == expected.texts()
    for name, entries in expected.logprobs.items():
        assert found.logprobs[name][:16] == entries[:16]
    for replay in (expected, found):
        replay.end()


def test_steps_with_drafts_replay_graphs_and_send_one_copy(
    plain: ModelRunner, drafting: ModelRunner, eager: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Replay(plain, ON_DEVICE)
    expected.run({}, random.Random(0))
    found = Replay(drafting, ON_DEVICE)
    driver, known = found.driver, expected.texts()
    names = list(driver.outputs)
    driver.step({name: driver.num_left(name) for name in names})
    eager.clear()
    steps: Any = drafting._steps
    hosts: list[int] = []
    monkeypatch.setattr(steps._sampler, "sample", lambda *_: hosts.append(1))
    sent: list[list[int]] = []
    send = steps._staging.send

    def note_and_send(arrays: list[Any]) -> Any:
        sent.append([len(array) for array in arrays])
        return send(arrays)

    monkeypatch.setattr(steps._staging, "send", note_and_send)
    num_blocks = sum(map(len, driver._blocks.values()))
    for num_drafts in (3, 2, 0, 1, 3):
        drafts = {}
        for index, name in enumerate(names):
            done = len(driver.outputs[name])
            drafts[name] = known[name][done : done + max(num_drafts - index % 2, 0)]
        driver.step(dict.fromkeys(names, 1), {name: guesses for name, guesses in drafts.items() if guesses})
    assert {name: outputs[:12] for name, outputs in driver.outputs.items()} == {
        name: outputs[: min(12, len(driver.outputs[name]))] for name, outputs in known.items()
    }
    assert min(map(len, driver.outputs.values())) >= 10  # all drafts were right
    assert not eager
    assert not hosts
    # Rows and drafts of a step go together, and new blocks before them; the device has kept tokens and places itself.
    assert sum(len(lengths) == 2 for lengths in sent) == 5
    assert (
        sum(lengths[0] for lengths in sent if len(lengths) == 1) == sum(map(len, driver._blocks.values())) - num_blocks
    )
    for replay in (expected, found):
        replay.end()


def test_a_wrong_draft_leaves_the_device_where_the_host_is(drafting: ModelRunner, eager: list[int]) -> None:
    driver = StepDriver(drafting, NUM_BLOCKS)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=1.0, seed=9))
    driver.add("b", [4, 5], GREEDY)
    driver.step({"a": 3, "b": 2})
    eager.clear()
    rows: Any = drafting._steps._rows  # type: ignore[union-attr]
    for guesses in ([95, 96, 94], [93], [92, 91]):
        driver.step({"a": 1, "b": 1}, {"a": guesses})
        for number, name in enumerate("ab"):
            num_known = {"a": 3, "b": 2}[name] + len(driver.outputs[name])
            row = drafting._batch._request_id_to_row[name]  # type: ignore[union-attr]
            assert rows.states[0][row, :2].tolist() == [driver.outputs[name][-1], num_known - 1], number
    assert not eager
    for name in "ab":
        driver.remove(name)
    driver.step({})


@pytest.mark.parametrize("guess", [[10, 20, 30], [10, 5, 30]])
def test_masks_of_places_leave_what_they_allow(drafting: ModelRunner, eager: list[int], guess: list[int]) -> None:
    """A constrained row allows one token at each place: 10, 20, 30, 40."""
    new = [NewRequest("masked", [1, 2], 2, SamplingParams(temperature=1.0, seed=1))]
    drafting.execute_model(SchedulerOutput(0, new, [ScheduledRequest("masked", 0, 2, [0, 1])])).result()
    eager.clear()

    def allow(*_: Any) -> TokenMasks:
        masks = np.zeros((4, -(-VOCAB_SIZE // 32)), dtype=np.uint32)
        for place, token in enumerate((10, 20, 30, 40)):
            masks[place, token // 32] = 1 << token % 32
        return TokenMasks(["masked"], bytearray(masks.tobytes()))

    row = ScheduledRequest("masked", 2, 4, [2], guess)
    output = drafting.execute_model(SchedulerOutput(1, [], [row]), allow).result()
    assert output.sampled_token_ids == [[10, 20, 30, 40] if guess[1] == 20 else [10, 20]]
    assert not eager
    drafting.execute_model(SchedulerOutput(2, removed_request_ids=["masked"])).result()


def test_rows_with_adapters_have_drafts_in_captured_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for num_drafts in (0, 2):
        lora = {"max_num_seqs": 3, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        runner = start(folder, CpuStandIn(), max_num_drafts=num_drafts, **lora)
        path = write_random_adapter(tmp_path / f"{num_drafts}", folder, ("c_attn", "c_proj"), seed=1)
        identity = identity_of(path, path.name)
        runner.add_adapter(identity, runner.read_adapter(identity, str(path)))
        eager = note_eager_steps(runner, monkeypatch)
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("a", [1, 2, 3], GREEDY, lora_name=identity)
        driver.add("b", [1, 2, 3], GREEDY)
        driver.step({"a": 3, "b": 3})
        eager.clear()
        while min(map(len, driver.outputs.values())) < 8:
            known = [] if not outputs else [outputs[0][name][len(driver.outputs[name]) :] for name in "ab"]
            drafts = {name: rest[:2] for name, rest in zip("ab", known, strict=False) if rest[:2]}
            driver.step({"a": 1, "b": 1}, drafts)
        assert not eager
        outputs.append({name: tokens[:8] for name, tokens in driver.outputs.items()})
    assert outputs[0] == outputs[1]
    assert outputs[0]["a"] != outputs[0]["b"]


def test_the_host_samples_places_of_a_row_beside_those_of_the_device(drafting: ModelRunner) -> None:
    driver = StepDriver(drafting, NUM_BLOCKS)
    driver.add("a", [1, 2], SamplingParams(temperature=0.0, allowed_token_ids=(5,)))
    driver.add("b", [1, 2], GREEDY)
    driver.step({"a": 2, "b": 2})
    driver.step({"a": 1, "b": 1}, {"a": [5, 5], "b": [driver.outputs["b"][0]]})
    assert driver.outputs["a"] == [5, 5, 5, 5]
    assert driver.errors == {}
    for name in "ab":
        driver.remove(name)
    driver.step({})


def test_graphs_reach_as_many_places_as_there_can_be(folder: Path) -> None:
    options = {"max_num_seqs": 4, "max_num_drafts": 3}
    assert "of up to 16 rows" in start(folder, CpuStandIn(), **options).backends()["decode"]
    assert "of up to 9 rows" in start(folder, CpuStandIn(), max_num_batched_tokens=9, **options).backends()["decode"]


def test_drafts_of_models_with_states_are_computed_without_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "block_auto_adjust_ff_dim": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_random_weights(tmp_path)
    outputs = []
    for num_drafts in (0, 2):
        runner = start(tmp_path, CpuStandIn(), max_num_seqs=2, max_num_drafts=num_drafts, num_state_blocks=9)
        eager = note_eager_steps(runner, monkeypatch)
        driver = StepDriver(runner, NUM_BLOCKS)
        driver.add("a", [1, 2, 3], SamplingParams(temperature=1.0, seed=1))
        driver.add("b", [4, 5], GREEDY)
        driver.step({"a": 3, "b": 2})
        eager.clear()
        while min(map(len, driver.outputs.values())) < 9:
            rest = [] if not outputs else outputs[0]["a"][len(driver.outputs["a"]) :]
            is_drafting = bool(rest) and len(driver.outputs["b"]) % 2 == 0
            num_left = driver.num_left("a")
            output = driver.step({"a": num_left, "b": 1}, {"a": [*rest[:1], 50]} if is_drafting else {})
            # States know no drafts, so a scheduler has those that were right computed again.
            driver._num_computed["a"] -= len(output.sampled_token_ids[0]) - 1
            assert eager == [2] * (is_drafting or num_left > 1)
            eager.clear()
        outputs.append({name: tokens[:9] for name, tokens in driver.outputs.items()})
    assert outputs[0] == outputs[1]
