"""Sessions of agents: their trace, and how well the made ones fit the published figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from statistics import mean, median

import pytest

from llmstack_types.agent_profiles import AGENT_PROFILES, AgentWorkload
from llmstack_types.agents import MAX_TURNS, AgentSession, AgentTurn, Asker, parse_sessions, write_sessions

TURN = {"asker": "person", "pause_s": 0, "new_tokens": 5, "output_tokens": 3}
SESSION = {"id": "s", "tenant": "a", "start_s": 0, "prefix": "p", "prefix_tokens": 9, "turns": [TURN]}


def prompts(session: AgentSession) -> Iterator[tuple[AgentTurn, int, int]]:
    """Each turn of a session with the tokens of its prompt, and those of the context before it."""
    context = session.num_prefix_tokens
    for turn in session.turns:
        before = session.num_prefix_tokens if turn.restarts else context
        yield turn, before + turn.num_new_tokens, before
        context = before + turn.num_new_tokens + (0 if turn.is_cancelled else turn.num_output_tokens)


def test_sessions_fit_the_published_figures() -> None:
    sessions = AgentWorkload(1000).sessions()
    turns = [found for session in sessions for found in prompts(session)]
    assert 38 <= median(len(session.turns) for session in sessions) <= 48
    assert 128_000 <= median(max(size for _, size, _ in prompts(session)) for session in sessions) <= 156_000
    assert 420 <= median(turn.num_output_tokens for turn, _, _ in turns) <= 470
    assert sum(before for _, _, before in turns) / sum(size for _, size, _ in turns) > 0.96
    assert 0.40 <= mean(any(turn.subagents for turn in session.turns) for session in sessions) <= 0.48
    assert max(before for _, _, before in turns) <= 240_000


@cache
def made(profile: str) -> list[AgentSession]:
    return AgentWorkload(800, profile).sessions()


def test_pauses_fit_the_profiles() -> None:
    def pauses(profile: str, tenant: str, asker: Asker) -> list[float]:
        return sorted(
            turn.pause_s
            for session in made(profile)
            if session.tenant == tenant
            for turn in session.turns[1:]
            if turn.asker is asker
        )

    for profile, tenant, factor in (("steady", "a", 1.0), ("tenants", "a", 0.5), ("tenants", "c", 2.0)):
        for asker, middle_s, late_s in ((Asker.TOOL, 4, 60), (Asker.PERSON, 90, 1200)):
            found = pauses(profile, tenant, asker)
            assert median(found) == pytest.approx(middle_s * factor, rel=0.15)
            assert found[len(found) * 95 // 100] == pytest.approx(late_s * factor, rel=0.25)
    spread = pauses("spread", "a", Asker.TOOL)
    assert median(spread) == pytest.approx(4, rel=0.15)
    assert spread[len(spread) * 95 // 100] > 1.1 * 60  # half of the sessions have twice the pauses


def test_a_person_leaves_after_one_exchange_in_seven() -> None:
    sessions = made("steady")
    exchanges = sum(turn.asker is Asker.PERSON for session in sessions for turn in session.turns)
    assert len(sessions) / exchanges == pytest.approx(0.15, rel=0.1)


def test_equal_seeds_give_equal_sessions() -> None:
    for profile in AGENT_PROFILES:
        assert AgentWorkload(20, profile, 5).sessions() == AgentWorkload(20, profile, 5).sessions()
        assert AgentWorkload(20, profile, 5).sessions() != AgentWorkload(20, profile, 6).sessions()
    tenants = {session.tenant for session in AgentWorkload(100, "tenants").sessions()}
    assert tenants == {"a", "b", "c"}


def test_what_was_written_is_read_again() -> None:
    sessions = AgentWorkload(60, "tenants", 3, length_scale=0.1).sessions()
    read = parse_sessions(write_sessions(sessions))
    assert [one.id for one in read] == [one.id for one in sessions]
    assert list(write_sessions(read)) == list(write_sessions(sessions))
    assert len(parse_sessions(write_sessions(sessions), limit=7)) == 7
    assert any(turn.subagents for session in read for turn in session.turns)
    assert any(turn.restarts or turn.is_cancelled for session in read for turn in session.turns)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": ""}, "id must be a text of 1 to 128 characters"),
        ({"tenant": 3}, "tenant must be a text"),
        ({"start_s": -1}, "start_s must be a number of seconds"),
        ({"start_s": float("nan")}, "start_s must be a number of seconds"),
        ({"prefix": ""}, "prefix must be a text of 1 to"),
        ({"prefix_tokens": 0}, "prefix_tokens must be an integer in"),
        ({"prefix_tokens": True}, "prefix_tokens must be an integer in"),
        ({"turns": []}, "turns must be a list of 1 to"),
        ({"turns": [TURN] * (MAX_TURNS + 1)}, "turns must be a list of 1 to"),
        ({"turns": [TURN | {"asker": "dog"}]}, "'dog' is not a valid Asker"),
        ({"turns": [TURN | {"cancelled": 1}]}, "cancelled must be true or false"),
        ({"turns": [TURN | {"new_tokens": 0}]}, "new_tokens must be an integer in"),
        ({"turns": [TURN | {"new_tokens": 1 << 24}]}, "a session has at most"),
        ({"turns": [{"asker": "tool"}]}, "has no pause_s"),
        ({"turns": [TURN | {"subagents": [SESSION]}]}, "the id 's' comes twice"),
        ({"turns": [TURN | {"subagents": [SESSION | {"id": "b", "prefix": ""}]}]}, "must be 0 without a prefix"),
    ],
)
def test_a_line_of_another_form_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=f"line 2 cannot be read: .*{reason}"):
        parse_sessions(["\n", json.dumps(SESSION | changes)])


def test_subagents_have_no_subagents() -> None:
    inner = SESSION | {"id": "c"}
    middle = SESSION | {"id": "b", "turns": [TURN | {"subagents": [inner]}]}
    with pytest.raises(ValueError, match="a subagent has no subagents"):
        parse_sessions([json.dumps(SESSION | {"turns": [TURN | {"subagents": [middle]}]})])


@pytest.mark.parametrize("line", ["[]", "3", "{", '{"id": "a"}', "[" * 100_000])
def test_what_is_no_session_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1 cannot be read"):
        parse_sessions([line])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no sessions"):
        parse_sessions(["\n"])
    with pytest.raises(ValueError, match="the profile must be one of"):
        AgentWorkload(profile="fast").sessions()
    with pytest.raises(ValueError, match="must be above 0"):
        AgentWorkload(0).sessions()
    with pytest.raises(ValueError, match="100001 sessions: 100000 are the most"):
        AgentWorkload(100_001).sessions()
