"""API processes ask each other; one that is silent, gone or talks nonsense is left out."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llmstack_server.state import peers as peers_module
from llmstack_server.state.peers import Peers


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[list[Peers]]:
    async with Peers(tmp_path, 0, 3) as first, Peers(tmp_path, 1, 3) as second, Peers(tmp_path, 2, 3) as third:
        found = [first, second, third]
        for peer in found:
            peer.answer_with({"index": lambda peer=peer: peer.index, "load": lambda: 5})
        yield found


async def test_the_answers_of_the_others_come_in_their_order(three: list[Peers]):
    assert await three[1].ask("index") == [0, 2]
    assert await three[0].ask("load") == [5, 5]


async def test_a_question_without_answers_returns_an_empty_list(three: list[Peers]):
    assert await three[0].ask("colour") == []


async def test_one_that_has_ended_is_left_out_and_its_place_can_be_taken_again(three: list[Peers], tmp_path: Path):
    await three[1].__aexit__(None, None, None)
    assert await three[0].ask("index") == [2]
    (tmp_path / "api-1.sock").touch()  # what a killed process leaves
    assert await three[0].ask("index") == [2]
    async with Peers(tmp_path, 1, 3) as again:
        again.answer_with({"index": lambda: 11})
        assert await three[0].ask("index") == [11, 2]


async def test_one_that_is_silent_costs_a_bounded_time(
    three: list[Peers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers_module, "ASK_TIMEOUT_S", 0.05)
    await three[1].__aexit__(None, None, None)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "api-1.sock"))
        silent.listen()
        assert await three[0].ask("index") == [2]


async def test_nothing_is_left_in_the_directory(tmp_path: Path):
    async with Peers(tmp_path, 0, 1) as alone:
        assert await alone.ask("index") == []
        assert os.listdir(tmp_path) == ["api-0.sock"]
    assert os.listdir(tmp_path) == []
