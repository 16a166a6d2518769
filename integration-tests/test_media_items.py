"""Items of prompts from the engine's door to the encoder: the tokens of a reference, whatever the scheduler does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_core_helpers.ports import free_address

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client import make_async_client
from llmstack_engine_client.clients import media_data
from llmstack_engine_client.clients.async_mp import AsyncAttachedClient
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_engine_core.ipc.link import Link
from llmstack_insight.explain import explain
from llmstack_insight.steps_of_log import steps_of_log
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver
from llmstack_model_runner.toy_vision import PATCH, register_toy_vision, toy_item, write_toy_vision
from llmstack_step_log import read_step_log
from llmstack_step_log.replay.verify import verify
from llmstack_types import (
    Control,
    EncoderStats,
    EncoderWork,
    EngineCoreRequest,
    InvalidRequestError,
    MediaItem,
    MediaMemory,
    ModelRunnerConfig,
    QuarantinedError,
    SamplingParams,
)

NUM_OUTPUTS, NUM_LAYERS, IMAGE = 12, 3, 96
CAT, DOG, LONG = (Random(seed).randbytes(n * PATCH) for seed, n in enumerate((9, 9, 24)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of the toy model, whose architecture this process and its children know."""
    made = tmp_path_factory.mktemp("toy")
    package = str(register_toy_vision(made / "registered"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package)
        patch.setenv("PYTHONPATH", os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield write_toy_vision(made / "model")


def prompt_of(items: Sequence[MediaItem], num_tokens: int = 40) -> list[int]:
    prompt = [(7 * place + 3) % 90 for place in range(num_tokens)]
    for item in items:
        prompt[item.offset : item.end] = [IMAGE] * item.num_tokens
    return prompt


def request_of(request_id: str, items: Sequence[MediaItem], **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, seed=0, ignore_eos=True)
    return EngineCoreRequest(request_id, prompt_of(items), params, media=tuple(items), **fields)


class Reference:
    """What the model runner gives for a request alone, with its prompt and each of its items in one piece."""

    def __init__(self, folder: Path) -> None:
        self._runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=128, block_size=4, device="cpu"))
        self._runner.load_model()
        self._runner.initialize_kv_cache(64)
        self._number = 0

    def __call__(self, items: Sequence[MediaItem]) -> list[int]:
        driver = StepDriver(self._runner, 64)
        numbered = tuple(enumerate(items, self._number + 1))
        self._number += len(items)
        driver.add("one", prompt_of(items), SamplingParams(temperature=0.0), media=numbered)
        driver.step({}, encoder_work=[EncoderWork(number, 0, NUM_LAYERS, item) for number, item in numbered])
        driver.run(NUM_OUTPUTS)
        driver.remove("one")
        driver.step({})
        return driver.outputs["one"]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


class Engine:
    """An engine core behind its client."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.errors: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    async def generate(self, *requests: EngineCoreRequest, kill_after: int = 0) -> list[list[int]]:
        """Tokens of each request; the engine core is killed once there are so many in all."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            await self.client.add_request(request)
        left = set(tokens)
        while left:
            outputs = await asyncio.wait_for(self.client.get_outputs(), 120)
            for output in outputs.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.num_cached_tokens >= 0:
                    self.cached[output.request_id] = output.num_cached_tokens
                if output.finish_reason is not None:
                    left.discard(output.request_id)
                    if output.error:
                        self.errors[output.request_id] = output.error
            if kill_after and sum(map(len, tokens.values())) >= kill_after:
                os.kill(self.client.pid, signal.SIGKILL)
                kill_after = 0
        return list(tokens.values())

    async def stats(self) -> EncoderStats:
        stats = (await self.client.call(Control.STATS)).encoder
        assert isinstance(stats, EncoderStats)
        return stats


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    model = {name: changes.pop(name) for name in ("tensor_parallel_size", "pipeline_parallel_size") if name in changes}
    scheduler = {name: changes.pop(name) for name in [*changes] if name in SchedulerConfig.__dataclass_fields__}
    limits = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4, **scheduler}
    limits["pipeline_parallel_size"] = model.get("pipeline_parallel_size", 1)
    return EngineConfig(
        ModelRunnerConfig(
            str(folder), block_size=4, device="cpu", max_model_len=128, max_num_seqs=4,
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            encoder_cache_tokens=limits.get("encoder_cache_tokens", 0), **model,
        ),
        scheduler=SchedulerConfig(**limits), num_blocks=changes.pop("num_blocks", 64), **changes,
    )  # fmt: skip


@asynccontextmanager
async def started(folder: Path, *, multiprocess: bool = False, **changes: Any) -> Any:
    config = config_of(folder, **changes)
    client = make_async_client(config, multiprocess=multiprocess)
    try:
        await client.wait_until_ready()
        yield Engine(client)
    finally:
        await client.shutdown()


async def test_items_are_encoded_once_found_again_and_replayed_without_their_bytes(
    folder: Path, reference: Reference, tmp_path: Path
) -> None:
    cat, dog = toy_item(CAT, 3), toy_item(DOG, 20, num_breaks=2)
    log = tmp_path / "steps"
    async with started(folder, record_steps=str(log)) as engine:
        expected = reference([cat, dog])
        assert await engine.generate(request_of("first", [cat, dog])) == [expected]
        before = await engine.stats()
        assert (before.num_encoded, before.num_hits) == (2, 0)
        assert await engine.generate(request_of("again", [cat, dog])) == [expected]
        assert (await engine.stats()).num_encoded == 2
        assert engine.cached["again"] == 36  # all full blocks but that of the last token
        swapped = [toy_item(DOG, 3, num_breaks=2), toy_item(CAT, 20)]
        other = reference(swapped)
        assert await engine.generate(request_of("swapped", swapped)) == [other]
        assert other != expected
        assert engine.cached["swapped"] == 0
        assert (await engine.stats()).num_encoded == 2  # the same items at other places
        # In one batch, one of them broken, and several completions of one prompt.
        gone = toy_item(LONG, 8, path=str(tmp_path / "gone"))
        forks = [request_of("fork-0", [cat]), request_of("fork-1", [cat], fork_of="fork-0"),
                 request_of("fork-2", [cat], fork_of="fork-0")]  # fmt: skip
        alone = reference([cat])
        found = await engine.generate(*forks, request_of("gone", [gone]), request_of("text", []))
        assert found == [alone, alone, alone, [], reference([])]
        assert engine.errors == {"gone": QuarantinedError.MEDIA_UNREADABLE}
        here = toy_item(LONG, 8)  # the same item with its bytes is encoded, not found broken
        assert await engine.generate(request_of("here", [here])) == [reference([here])]
        assert await engine.generate(request_of("large", [toy_item(bytes(25 * PATCH), 3)])) == [[]]
        assert "media[0] has 25" in engine.errors["large"]
    verify(read_step_log(log))
    assert CAT not in log.read_bytes()


async def test_an_engine_core_of_another_machine_gets_bytes_in_several_messages(
    folder: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, address = tmp_path / "keys", free_address()
    make_key_file(keys)
    monkeypatch.setattr(media_data, "PART_BYTES", 7)
    for name, data in (("cat", CAT), ("long", LONG)):
        (tmp_path / name).write_bytes(data)
    items = [toy_item(CAT, 3, path=str(tmp_path / "cat")), toy_item(LONG, 14, path=str(tmp_path / "long"))]
    process = launch_engine_process(config_of(folder, key_file=str(keys)), address)
    client = AsyncAttachedClient(address, link=Link(str(keys), heartbeat_timeout_s=60.0))
    try:
        await client.wait_until_ready()
        engine = Engine(client)
        assert await engine.generate(request_of("sent", items)) == [reference([toy_item(CAT, 3), toy_item(LONG, 14)])]
        cut = replace(items[1], digest=bytes(32), memory=MediaMemory(len(LONG) + 1, path=str(tmp_path / "long")))
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            await client.add_request(request_of("cut", [items[0], cut]))
        assert await engine.generate(request_of("cut", [toy_item(DOG, 3)])) == [reference([toy_item(DOG, 3)])]
    finally:
        await client.shutdown()
        process.stop()


async def test_an_explanation_says_where_items_were_found_and_what_they_cost(folder: Path, tmp_path: Path) -> None:
    cat, dog, log = toy_item(CAT, 3), toy_item(DOG, 20), tmp_path / "steps"
    budgets = {"encoder_budget_units": 1, "encoder_cache_tokens": 64}
    async with started(folder, multiprocess=True, record_steps=str(log), **budgets) as engine:
        for request in (
            request_of("new", [cat]), request_of("prefix", [cat]), request_of("moved", [replace(cat, offset=1)]),
            request_of("both", [cat, dog]), request_of("first", [dog, replace(cat, offset=30)]),
            request_of("late", [toy_item(LONG, 0)]),
        ):  # fmt: skip
            await engine.generate(request)
        live = await engine.client.call(Control.RECENT_STEPS, 0)
    names = ("new", "prefix", "moved", "both", "first", "late")
    recorded, counts = steps_of_log(read_step_log(log), 512), ("in_prefix_cache", "in_encoder_cache", "encoded")
    for steps in (live, recorded):
        found = {name: explain(steps, name) for name in names}
        facts = {name: tuple(one.facts[f"media_{count}"] for count in counts) for name, one in found.items()}
        assert facts == {
            "new": (0, 0, 1), "prefix": (1, 0, 0), "moved": (0, 1, 0), "both": (1, 0, 1), "first": (0, 2, 0),
            "late": (0, 0, 1),
        }  # fmt: skip
        assert [found[name].facts["encoder_units"] for name in names] == [9, 0, 0, 9, 0, 24]
        assert found["new"].facts["encoder_steps"] == 2  # eight units of three layers, then the rest
        assert "Its picture has 9 vectors: it was encoded in 2 steps of " in " ".join(found["new"].sentences)
        assert "Its picture has 9 vectors: the prefix cache held it." in found["prefix"].sentences
        assert "Its 2 pictures have 18 vectors: the encoder cache held 2." in found["first"].sentences
        for one in found.values():
            assert sum(one.facts["spans_ms"].values()) == pytest.approx(one.facts["total_ms"])
        assert found["new"].facts["spans_ms"]["encoder"] == 0  # in both steps it had a row
        assert found["late"].facts["encoder_steps"] == 3
        assert found["late"].facts["spans_ms"]["encoder"] > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
async def test_requests_that_compete_for_steps_blocks_and_room_have_the_tokens_of_each_alone(
    folder: Path, reference: Reference, tmp_path: Path, seed: int
) -> None:
    draw = Random(seed)
    pictures = [draw.randbytes(draw.randint(1, 16) * PATCH) for _ in range(4)]
    requests = []
    for index in range(12):
        first = toy_item(draw.choice(pictures), draw.randint(0, 5), num_breaks=draw.randint(0, 1))
        second = toy_item(draw.choice(pictures), draw.randint(first.end, 23))
        requests.append(request_of(f"{index}", draw.choice([[first], [first, second], []])))
    limits = {
        "max_num_batched_tokens": draw.choice([3, 7, 23]), "encoder_cache_tokens": draw.choice([16, 17, 40]),
        "encoder_budget_units": draw.choice([1, 9, 100]), "num_blocks": 33,
    }  # fmt: skip
    log = tmp_path / "steps"
    async with started(folder, record_steps=str(log), **limits) as engine:
        found = await engine.generate(*requests)
    assert not engine.errors
    assert found == [reference(request.media) for request in requests]
    verify(read_step_log(log))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {}], ids=str)
async def test_a_killed_engine_core_encodes_again_and_goes_on_token_for_token(
    folder: Path, reference: Reference, ranks: dict[str, int]
) -> None:
    cat, dog = toy_item(CAT, 3), toy_item(DOG, 20, num_breaks=2)
    requests = [request_of("both", [cat, dog]), request_of("dog", [dog]), request_of("text", [])]
    expected = [reference(request.media) for request in requests]
    limits = {"max_num_batched_tokens": 5, "encoder_budget_units": 1, "max_restarts": 5}
    async with started(folder, multiprocess=True, **limits, **ranks) as engine:
        assert await engine.generate(*requests) == expected
        for kill_after in (1, 7):
            again = [replace(request, request_id=f"{request.request_id}-{kill_after}") for request in requests]
            assert await engine.generate(*again, kill_after=kill_after) == expected
        assert not engine.errors
