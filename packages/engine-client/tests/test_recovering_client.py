"""A client whose engine core dies goes on with another one: its requests lose nothing but time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_client import RecoveringClient, make_async_client
from llmstack_engine_core import EngineConfig
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineStartError,
    FinishReason,
    InvalidRequestError,
    ModelRunnerConfig,
    QuarantinedError,
    SamplingParams,
    SchedulerStats,
)

DEADLY = 666


def recovering(options: str, **changes: Any) -> RecoveringClient:
    values = {"runner": "echo", "log_level": "CRITICAL", "shutdown_grace_s": 3.0, "max_restarts": 3, **changes}
    client = make_async_client(EngineConfig(ModelRunnerConfig(f"echo?{options}"), **values))
    assert isinstance(client, RecoveringClient)
    return client


def request(request_id: str, max_tokens: int = 8, prompt: tuple[int, ...] = (5, 6, 7)) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, logprobs=1, prompt_logprobs=1)
    return EngineCoreRequest(request_id, list(prompt), params)


def echo(num_tokens: int, prompt: tuple[int, ...] = (5, 6, 7)) -> list[int]:
    return [prompt[index % len(prompt)] for index in range(num_tokens)]


async def restart(client: RecoveringClient, number: int = 1) -> None:
    """Returns when another process has been started so often."""
    async with asyncio.timeout(30):
        while client.num_restarts < number:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.01)


class Reader:
    """Everything that came, by request."""

    def __init__(self, client: RecoveringClient) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.num_logprobs: dict[str, int] = {}
        self.num_cached: dict[str, int] = {}
        self.num_firsts: dict[str, int] = {}
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}
        self.stats: list[SchedulerStats] = []
        self._client = client

    async def read(self, num_ended: int) -> None:
        async with asyncio.timeout(60):
            while len(self.ends) < num_ended:
                self._note(await self._client.get_outputs())

    async def read_tokens(self, num_tokens: int) -> None:
        """Reads until some request has so many."""
        async with asyncio.timeout(60):
            while max(map(len, self.tokens.values()), default=0) < num_tokens:
                self._note(await self._client.get_outputs())

    async def read_stats(self, num_in_flight: int) -> None:
        """Reads until the last statistics have so many requests."""
        async with asyncio.timeout(60):
            while not self.stats or self.stats[-1].num_running + self.stats[-1].num_waiting != num_in_flight:
                self._note(await self._client.get_outputs())

    def _note(self, outputs: Any) -> None:
        if outputs.scheduler_stats is not None:
            self.stats.append(outputs.scheduler_stats)
        for output in outputs.outputs:
            name = output.request_id
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.num_logprobs[name] = self.num_logprobs.get(name, 0) + len(output.logprobs or ())
            self.num_cached[name] = max(self.num_cached.get(name, -1), output.num_cached_tokens)
            self.num_firsts[name] = self.num_firsts.get(name, 0) + (output.prompt_logprobs is not None)
            if output.finish_reason is not None:
                assert name not in self.ends
                self.ends[name] = output.finish_reason, output.error


async def test_requests_go_on_where_they_were() -> None:
    client = recovering("step_delay_s=0.02")
    await client.wait_until_ready()
    first_pid = client.pid
    for index in range(4):
        await client.add_request(request(f"r{index}", max_tokens=90 + index))
    reader = Reader(client)
    await reader.read_tokens(5)
    os.kill(client.pid, signal.SIGKILL)
    await reader.read(4)
    assert reader.tokens == {f"r{index}": echo(90 + index) for index in range(4)}
    assert reader.num_logprobs == {f"r{index}": 90 + index for index in range(4)}
    assert set(reader.num_firsts.values()) == {1}
    assert {reason for reason, _ in reader.ends.values()} == {FinishReason.LENGTH}
    assert client.num_restarts == 1
    assert client.pid != first_pid
    assert client.num_requests == 0
    assert not client.is_dead
    await client.shutdown()


async def test_one_that_stands_still_is_replaced_as_one_that_is_dead() -> None:
    # Each of the two computes half of the tokens, however late this process looks.
    client = recovering("hang_at_step=16", hang_timeout_s=2.0)
    await client.wait_until_ready()
    first_pid = client.pid
    await client.add_request(request("r", max_tokens=30))
    reader = Reader(client)
    await reader.read_tokens(15)
    with contextlib.suppress(ProcessLookupError):  # its last step never ends either, and this process may be late
        os.kill(first_pid, signal.SIGSTOP)  # neither dead nor alive
    await reader.read(1)
    assert reader.tokens == {"r": echo(30)}
    assert client.num_restarts == 1
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)
    await client.shutdown()


async def test_a_step_that_never_ends_is_ended_and_leaves_its_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # The first steps may take as long as the start, of which this is a twentieth.
    client = recovering("hang_at_step=4", hang_timeout_s=2.0, max_restarts=1, start_timeout_s=20.0)
    await client.wait_until_ready()
    await client.add_request(request("r", max_tokens=6))
    reader = Reader(client)
    await reader.read(1)
    assert reader.tokens == {"r": echo(6)}
    assert client.num_restarts == 1
    assert "_misbehave" in capfd.readouterr().err
    await client.shutdown()


async def test_a_step_that_takes_long_is_not_ended() -> None:
    client = recovering("step_delay_s=0.7", hang_timeout_s=0.2)
    await client.wait_until_ready()
    await client.add_request(request("r", max_tokens=3))
    reader = Reader(client)
    await reader.read(1)
    assert client.num_restarts == 0
    await client.shutdown()


async def test_one_that_is_killed_while_it_is_idle_is_replaced() -> None:
    client = recovering("")
    await client.wait_until_ready()
    reading = asyncio.ensure_future(client.get_outputs())
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    await restart(client)
    await client.add_request(request("r"))  # comes while the other one starts
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.add_request(request("r"))
    reader = Reader(client)
    reader._note(await reading)
    await reader.read(1)
    assert reader.tokens == {"r": echo(8)}
    assert (await client.call(Control.STATS)).num_running == 0
    await client.shutdown()


async def test_after_a_quarantine_the_statistics_say_that_nothing_is_running() -> None:
    client = recovering(f"step_delay_s=0.01&deadly_token_id={DEADLY}")
    await client.wait_until_ready()
    reader = Reader(client)
    await client.add_request(request("bad", prompt=(1, 2, 3, 4, 5, DEADLY)))
    await reader.read_stats(1)
    assert reader.stats[-1].kv_cache_usage > 0
    await reader.read(1)
    assert reader.ends["bad"] == (FinishReason.ERROR, QuarantinedError.KILLS_ENGINES)
    await reader.read_stats(0)
    assert reader.stats[-1].kv_cache_usage == 0
    await client.shutdown()


async def test_salts_separate_prefixes_after_a_crash_as_before() -> None:
    client = recovering("step_delay_s=0.02")
    await client.wait_until_ready()
    prompt = tuple(range(1, 50))
    await client.add_request(replace(request("first", 60, prompt), cache_salt="one"))
    reader = Reader(client)
    await reader.read_tokens(3)
    os.kill(client.pid, signal.SIGKILL)
    await reader.read(1)
    for name, salt in (("same", "one"), ("other", "two"), ("none", "")):
        # Log-probabilities of the prompt would need it computed again.
        plain = replace(request(name, 2, prompt), sampling_params=SamplingParams(max_tokens=2, seed=0))
        await client.add_request(replace(plain, cache_salt=salt))
    await reader.read(4)
    assert reader.num_cached["same"] > 0
    assert (reader.num_cached["other"], reader.num_cached["none"]) == (0, 0)
    await client.shutdown()


async def test_requests_do_not_go_on_with_other_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("these")
    client = recovering(f"step_delay_s=0.02&load_delay_s=0.3&weights_file={weights}")
    await client.wait_until_ready()
    reader = Reader(client)
    for index in range(2):
        await client.add_request(request(f"r{index}", max_tokens=50))
    await reader.read_tokens(3)
    weights.write_text("others")
    os.kill(client.pid, signal.SIGKILL)
    reading = asyncio.ensure_future(reader.read(3))
    await restart(client)
    await client.add_request(request("since"))
    await reading
    assert reader.ends.pop("since") == (FinishReason.LENGTH, None)
    assert set(reader.ends.values()) == {(FinishReason.ERROR, EngineLostError.TEXT)}
    assert client.num_requests == 0
    await client.shutdown()


async def test_a_request_that_kills_is_found_and_the_others_are_served() -> None:
    client = recovering(f"deadly_token_id={DEADLY}", max_restarts=1)
    await client.wait_until_ready()
    reader = Reader(client)
    for index in range(4):
        await client.add_request(request(f"good{index}"))
    await client.add_request(request("bad", prompt=(1, 2, DEADLY)))
    await reader.read(5)
    assert reader.ends.pop("bad") == (FinishReason.ERROR, QuarantinedError.KILLS_ENGINES)
    assert reader.tokens.pop("bad") == [1, 2]
    assert reader.tokens == {f"good{index}": echo(8) for index in range(4)}
    assert {reason for reason, _ in reader.ends.values()} == {FinishReason.LENGTH}
    await client.add_request(request("after"))
    await reader.read(5)
    assert reader.tokens["after"] == echo(8)
    await client.shutdown()


async def test_a_request_that_is_aborted_meanwhile_is_not_resumed() -> None:
    client = recovering("step_delay_s=0.02&load_delay_s=0.3")
    await client.wait_until_ready()
    await client.add_request(request("stays", max_tokens=60))
    await client.add_request(request("goes", max_tokens=1000))
    reader = Reader(client)
    await reader.read_tokens(3)
    os.kill(client.pid, signal.SIGKILL)
    reading = asyncio.ensure_future(reader.read(1))
    await restart(client)
    await client.abort_requests(["goes", "unknown"])
    await reading
    assert reader.tokens["stays"] == echo(60)
    assert len(reader.tokens["goes"]) < 60
    assert client.num_requests == 0
    await client.shutdown()


async def test_one_that_dies_again_and_again_is_given_up() -> None:
    client = recovering("", max_restarts=1)
    await client.wait_until_ready()
    reading = asyncio.ensure_future(client.get_outputs())
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    await restart(client)
    await client.call(Control.STATS)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="too often within a minute"):
        await reading
    assert client.is_dead
    with pytest.raises(EngineDeadError):
        await client.add_request(request("other"))
    with pytest.raises(EngineDeadError):
        await client.call(Control.STATS)
    await client.shutdown()


async def test_one_that_cannot_start_is_not_tried_again() -> None:
    client = recovering("load_error=the+model+is+odd")
    with pytest.raises(EngineStartError, match="the model is odd"):
        await client.wait_until_ready()
    assert client.num_restarts == 0
    await client.shutdown()


def beams(name: str, width: int, max_tokens: int) -> list[EngineCoreRequest]:
    params = SamplingParams(n=width, max_tokens=max_tokens, seed=0, use_beam_search=True, temperature=0.0)
    names = [name, *(f"{name}-{index}" for index in range(1, width))]
    return [replace(request(one), sampling_params=params, fork_of="" if one == name else name) for one in names]


async def test_a_beam_search_starts_again_and_finds_the_same() -> None:
    found: list[dict[str, list[int]]] = []
    for is_killed in (False, True):
        client = recovering("step_delay_s=0.03" if is_killed else "")
        await client.wait_until_ready()
        for one in [*beams("search", 3, 40), request("other", max_tokens=40)]:
            await client.add_request(one)
        reader = Reader(client)
        await reader.read_tokens(5)
        if is_killed:
            os.kill(client.pid, signal.SIGKILL)
        await reader.read(4)
        assert {reason for reason, _ in reader.ends.values()} == {FinishReason.LENGTH}
        assert client.num_restarts == is_killed
        found.append(reader.tokens)
        await client.shutdown()
    assert found[0] == found[1]
    assert len(found[0]["search-1"]) == 40


async def test_a_beam_search_without_all_of_its_beams_ends_with_an_error() -> None:
    client = recovering("step_delay_s=0.02")
    await client.wait_until_ready()
    for one in [*beams("search", 2, 1000), request("other", max_tokens=20)]:
        await client.add_request(one)
    reader = Reader(client)
    await reader.read_tokens(3)
    await client.abort_requests(["search-1"])
    os.kill(client.pid, signal.SIGKILL)
    await reader.read(2)
    assert reader.ends["search"] == (FinishReason.ERROR, EngineLostError.TEXT)
    assert reader.tokens["other"] == echo(20)
    await client.shutdown()


async def test_those_let_go_while_there_is_no_engine_core_are_sent_to_the_next_one() -> None:
    client = recovering(f"deadly_token_id={DEADLY}&load_delay_s=0.6&step_delay_s=0.1")
    await client.wait_until_ready()
    for name in ("bad0", "bad1"):
        await client.add_request(request(name, prompt=(1, DEADLY)))
    goods = [f"good{index}" for index in range(6)]
    for name in goods:
        await client.add_request(request(name))
    reader = Reader(client)
    reading = asyncio.ensure_future(reader.read(6))
    await restart(client, 3)  # all eight, half of them, and then the two alone, while two groups wait for them
    await client.abort_requests(["bad0", "bad1"])
    await reading
    assert {name: reader.tokens[name] for name in reader.ends} == {name: echo(8) for name in goods}
    assert client.num_requests == 0
    await client.shutdown()


async def test_shutting_down_ends_a_restart_under_way() -> None:
    client = recovering("load_delay_s=0.5")
    await client.wait_until_ready()
    reading = asyncio.ensure_future(client.get_outputs())
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    await restart(client)
    asking = asyncio.ensure_future(client.call(Control.STATS))
    await client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await reading
    with pytest.raises(EngineDeadError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(client.pid, 0)
