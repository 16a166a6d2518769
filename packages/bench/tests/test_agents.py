"""Sessions of agents as a load: contexts grow by the answers, and turns wait for what comes before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.agents import agent_values, num_turns
from llmstack_bench.result import RequestResult
from llmstack_bench.testing import Behaviour, FakeServer
from llmstack_command.main import main
from llmstack_types.agent_profiles import AgentWorkload
from llmstack_types.agents import AgentSession, AgentTurn, Asker, write_sessions

LINE = ("--dataset-name", "agents", "--endpoint", "/v1/chat/completions", "--disable-tqdm", "--num-warmups", "0")


def run(folder: Path, server: FakeServer, sessions: list[AgentSession], *arguments: str) -> dict[str, Any]:
    path = folder / "sessions.jsonl"
    path.write_text("".join(write_sessions(sessions)))
    line = (*LINE, "--base-url", server.url, "--dataset-path", str(path), "--output-json", str(folder / "r.json"))
    assert main(["bench", "serve", *line, "--save-detailed", *arguments]) == 0
    found = json.loads((folder / "r.json").read_text())["servers"][0]["runs"][0]
    return dict(found)


def turn(num_new: int, num_output: int = 2, **fields: Any) -> AgentTurn:
    return AgentTurn(Asker.TOOL, 0.01, num_new, num_output, **fields)


def test_each_prompt_has_the_one_before_and_its_answer(tmp_path: Path) -> None:
    session = AgentSession("s", "a", 0.0, "p", 5, (turn(3), turn(4, 3), turn(2)))
    with FakeServer() as server:
        found = run(tmp_path, server, [session])
    first, second, third = (body["messages"] for body in server.bodies)
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert second[:2] == first
    assert third[:4] == second
    assert (second[2]["content"], third[4]["content"]) == ("x x ", "x x x ")
    assert [len(message["content"].split()) for message in first] == [5, 3]
    assert [body["max_tokens"] for body in server.bodies] == [2, 3, 2]
    assert [request["turn"] for request in found["requests"]] == [1, 2, 3]


def test_a_restart_drops_all_but_the_beginning(tmp_path: Path) -> None:
    session = AgentSession("s", "a", 0.0, "p", 5, (turn(3), turn(4, restarts=True)))
    with FakeServer() as server:
        run(tmp_path, server, [session])
    messages = server.bodies[1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0] == server.bodies[0]["messages"][0]


def test_the_next_turn_waits_for_subagents(tmp_path: Path) -> None:
    fork = AgentSession("f", "a", 0.0, "", 0, (turn(6), turn(1)))
    fresh = AgentSession("g", "a", 0.0, "q", 7, (turn(1),))
    session = AgentSession("s", "a", 0.0, "p", 5, (turn(3, subagents=(fork, fresh)), turn(4)))
    with FakeServer(Behaviour(token_delay_s=0.02)) as server:
        run(tmp_path, server, [session])
    parent, *inner, last = (body["messages"] for body in server.bodies)
    assert len(inner) == 3
    assert last[:3] == [*parent, {"role": "assistant", "content": "x x "}]
    assert sorted(len(messages) for messages in inner) == [2, 4, 6]  # its own beginning; that of the parent, twice
    assert all(messages[:3] == last[:3] for messages in inner if len(messages) > 2)


def test_a_cancelled_answer_is_cut_off_and_left_out(tmp_path: Path) -> None:
    session = AgentSession("s", "a", 0.0, "p", 5, (turn(3, 4, is_cancelled=True), turn(4)))
    with FakeServer(Behaviour(token_delay_s=0.005)) as server:
        found = run(tmp_path, server, [session])
    assert server.bodies[0]["max_tokens"] == 8
    assert server.bodies[1]["messages"][2] == {"role": "assistant", "content": "."}
    assert [request["num_output_tokens"] for request in found["requests"]] == [4, 2]
    assert found["failed"] == 0


def test_a_session_whose_request_fails_ends_there(tmp_path: Path) -> None:
    session = AgentSession("s", "a", 0.0, "p", 5, (turn(3), turn(4)))
    with FakeServer(Behaviour(status=500)) as server:
        path = tmp_path / "sessions.jsonl"
        path.write_text("".join(write_sessions([session])))
        assert main(["bench", "serve", *LINE, "--base-url", server.url, "--dataset-path", str(path)]) == 1
    assert len(server.bodies) == 1


def test_made_sessions_are_sent_to_their_ends(tmp_path: Path) -> None:
    sessions = AgentWorkload(2, "tenants", 0, gap_s=1, length_scale=0.002).sessions()
    line = ("--agent-sessions", "2", "--agent-profile", "tenants", "--agent-gap", "1", "--trace-length-scale", "0.002")
    with FakeServer() as server:
        arguments = ["bench", "serve", *LINE, "--base-url", server.url, *line, "--trace-speed", "100000"]
        assert main([*arguments, "--max-concurrency", "3", "--output-json", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())["servers"][0]["median"]
    assert found["completed"] == num_turns(sessions) == len(server.bodies)
    assert found["max_in_flight"] <= 3
    assert "median_ttft_turn_from_21_ms" in found


def test_the_share_of_the_cache_and_the_groups_of_turns() -> None:
    results = [
        RequestResult(ttft_s=0.1 * place, num_prompt_tokens=100, num_cached_tokens=10 * place, turn=place)
        for place in (1, 2, 5, 6, 20, 21, 90)
    ]
    found = agent_values(results)
    assert found["cached_fraction"] == pytest.approx(sum((1, 2, 5, 6, 20, 21, 90)) / 70)
    assert found["median_ttft_turn_1_ms"] == pytest.approx(100)
    assert found["median_ttft_turn_2_to_5_ms"] == pytest.approx(350)
    assert found["median_ttft_turn_6_to_20_ms"] == pytest.approx(1300)
    assert found["median_ttft_turn_from_21_ms"] == pytest.approx(5550)
    assert agent_values([RequestResult(ttft_s=1.0)]) == {}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dataset-name", "agents"), "needs --endpoint /v1/chat/completions"),
        ((*LINE, "--dataset-path", "/nowhere"), "--dataset-path /nowhere: No such file"),
        ((*LINE, "--trace-length-scale", "1000"), "--dataset-name agents: the number of sessions"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer() as server:
        assert main(["bench", "serve", "--base-url", server.url, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_of_another_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text('{"id": 3}\n')
    with FakeServer() as server:
        assert main(["bench", "serve", "--base-url", server.url, *LINE, "--dataset-path", str(path)]) == 2
    assert "line 1 cannot be read: id must be a text" in capsys.readouterr().err
