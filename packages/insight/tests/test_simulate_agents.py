"""Sessions of agents through the real scheduler and cache: every token has its cause, whatever the cache holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.commands.simulate import SimulateCommand
from llmstack_insight.simulate.agents import simulate_agents
from llmstack_insight.simulate.simulation import SimulationConfig
from llmstack_types.agent_profiles import AGENT_PROFILES, AgentWorkload
from llmstack_types.agents import AgentSession, AgentTurn, Asker, write_sessions

CONFIG = SimulationConfig()


def sessions_of(profile: str, num_sessions: int = 12, seed: int = 0) -> list[AgentSession]:
    return AgentWorkload(num_sessions, profile, seed, length_scale=0.02).sessions()


def all_of(sessions: list[AgentSession] | tuple[AgentSession, ...]) -> Iterator[AgentSession]:
    for session in sessions:
        yield session
        for turn in session.turns:
            yield from all_of(turn.subagents)


@pytest.mark.parametrize("profile", sorted(AGENT_PROFILES))
def test_with_room_nothing_is_computed_twice(profile: str) -> None:
    sessions = sessions_of(profile)
    report = simulate_agents(sessions, CONFIG)
    turns = [turn for session in all_of(sessions) for turn in session.turns]
    assert report.timing.num_requests == len(turns)
    assert report.timing.num_output_tokens == sum(turn.num_output_tokens for turn in turns)
    assert report.num_again_tokens == 0
    assert report.timing.num_evictions == 0
    assert report.num_prompt_tokens == report.timing.num_prompt_tokens
    assert report.num_found_tokens <= report.timing.num_hit_tokens <= report.num_found_tokens + 16 * len(turns)
    assert all(result.num_again_tokens == 0 for result in report.policies.values())
    # The prefixes, the new tokens, and the last token of each answer, which no request had computed.
    prefixes = {(one.tenant, one.prefix): one.num_prefix_tokens for one in all_of(sessions) if one.prefix}
    new = sum(prefixes.values()) + sum(turn.num_new_tokens + 1 for turn in turns)
    assert report.num_new_tokens == pytest.approx(new, rel=0.02)


def test_eviction_by_sessions_computes_less_again() -> None:
    report = simulate_agents(sessions_of("spread", 40), replace(CONFIG, knows_sessions=True), memory_share=0.6)
    lru, oracle = report.policies["lru"], report.policies["oracle"]
    assert oracle.num_again_tokens < report.num_again_tokens < 0.9 * lru.num_again_tokens


@pytest.mark.parametrize("profile", sorted(AGENT_PROFILES))
def test_what_the_engine_finds_is_what_the_calculation_says(profile: str) -> None:
    report = simulate_agents(sessions_of(profile, 20), CONFIG, memory_share=0.6)
    lru, oracle = report.policies["lru"], report.policies["oracle"]
    assert report.num_again_tokens == pytest.approx(lru.num_again_tokens, rel=0.04)
    assert 0 < oracle.num_again_tokens < 0.6 * lru.num_again_tokens
    assert report.timing.num_blocks == round(0.6 * report.num_needed_blocks)


def test_all_that_is_open_fits_into_what_is_needed() -> None:
    """With the oracle's order: it never evicts what is needed while something else is there."""
    report = simulate_agents(sessions_of("steady", 20), CONFIG, memory_share=1.0)
    assert report.policies["oracle"].num_again_tokens == 0


def test_without_a_cache_everything_is_computed_again() -> None:
    report = simulate_agents(sessions_of("steady", 4), replace(CONFIG, enable_prefix_caching=False))
    assert report.num_found_tokens == 0
    assert report.num_again_tokens + report.num_rounded_tokens + report.num_new_tokens == report.num_prompt_tokens


def test_the_next_turn_waits_for_the_subagents() -> None:
    """One token is one step of 1 s; the subagent has three turns of two tokens, and pauses of 10 s."""

    class OneSecond:
        def step_s(self, work: object) -> float:
            return 1.0

    inner = AgentSession("b", "a", 0.0, "", 0, tuple(AgentTurn(Asker.TOOL, 10.0, 20, 2) for _ in range(3)))
    first = AgentTurn(Asker.PERSON, 0.0, 20, 1, subagents=(inner,))
    outer = AgentSession("a", "a", 5.0, "p", 40, (first, AgentTurn(Asker.TOOL, 3.0, 20, 1)))
    report = simulate_agents([outer], CONFIG, OneSecond())
    # 5 s, one step, then 2 steps, 10 s, 2 steps, 10 s, 2 steps, then a pause of 3 s and one step.
    assert report.timing.simulated_s == pytest.approx(5 + 1 + 2 + 10 + 2 + 10 + 2 + 3 + 1)
    # Known are the 60 tokens of the parent to the subagent, its own to it, and those of the parent to itself.
    assert report.num_found_tokens + report.num_rounded_tokens == 60 + 82 + 104 + 60
    assert report.num_found_tokens == 48 + 80 + 96 + 48


def test_a_cancelled_answer_is_not_in_the_next_prompt() -> None:
    turns = (AgentTurn(Asker.PERSON, 0.0, 20, 8, is_cancelled=True), AgentTurn(Asker.PERSON, 1.0, 20, 1))
    report = simulate_agents([AgentSession("a", "a", 0.0, "p", 40, turns)], CONFIG)
    assert report.num_prompt_tokens == 60 + 80
    restarted = (turns[0], replace(turns[1], restarts=True))
    report = simulate_agents([AgentSession("a", "a", 0.0, "p", 40, restarted)], CONFIG)
    assert report.num_prompt_tokens == 60 + 60
    assert report.num_found_tokens == 32


@pytest.mark.parametrize(
    ("config", "share", "reason"),
    [
        (replace(CONFIG, num_replicas=2), None, "on one replica"),
        (replace(CONFIG, predicts=True), None, "without --predict"),
        (replace(CONFIG, num_blocks=9), 0.5, "without a number of blocks"),
        (CONFIG, 1.5, "at most 1"),
        (replace(CONFIG, num_blocks=3), None, "need more blocks"),
        (replace(CONFIG, block_size=0), None, "block_size"),
    ],
)
def test_what_makes_no_sense_is_refused(config: SimulationConfig, share: float | None, reason: str) -> None:
    with pytest.raises(SimulationError, match=reason):
        simulate_agents(sessions_of("steady", 2), config, memory_share=share)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command = SimulateCommand()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


AGENTS = ("--dataset", "agents", "--agent-sessions", "3", "--length-scale", "0.02")


def test_the_command_writes_sessions_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sessions.jsonl"
    assert run(*AGENTS, "--json", "--write-sessions", str(path)) == 0
    made = json.loads(capsys.readouterr().out)
    assert path.read_text() == "".join(write_sessions(sessions_of("steady", 3)))
    assert run("--trace", str(path), "--format", "agents", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["agents"]["tokens"] == made["agents"]["tokens"]
    assert set(made["agents"]["ttft_s"]) == {"1", "2-5", "6-20", "21+"}
    assert run(*AGENTS, "--memory-share", "0.9") == 0
    text = capsys.readouterr().out
    assert "again that were evicted" in text
    assert "the cache has 90 % of them" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give --trace FILE and --format, or --dataset agents"),
        (("--format", "agents"), "give --trace FILE and --format"),
        ((*AGENTS, "--trace", "x", "--format", "agents"), "give --trace FILE and --format"),
        (("--trace", "/nowhere", "--format", "agents"), "/nowhere: No such file or directory"),
        ((*AGENTS, "--replicas", "2"), "on one replica"),
        ((*AGENTS, "--write-sessions", "/nowhere/a"), "/nowhere/a: No such file or directory"),
        (("--trace", "x", "--format", "azure", "--memory-share", "0.5"), "are for sessions of agents"),
        ((*AGENTS, "--length-scale", "1000"), "--dataset agents: the number of sessions"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert reason in capsys.readouterr().err
