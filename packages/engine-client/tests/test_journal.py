"""The journal knows what each request in flight needs to go on in another engine core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmstack_engine_client.recovery.journal import Journal
from llmstack_types import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams


def request(
    request_id: str, *, fork_of: str = "", num_beams: int = 0, earlier: tuple[int, ...] = ()
) -> EngineCoreRequest:
    params = SamplingParams(n=max(num_beams, 1), use_beam_search=num_beams > 0, temperature=0.0)
    return EngineCoreRequest(request_id, [1, 2], params, fork_of=fork_of, output_token_ids=earlier)


def journal_of(*requests: EngineCoreRequest) -> Journal:
    journal = Journal()
    for one in requests:
        assert journal.add(one)
    return journal


def test_requests_are_in_the_order_of_their_arrival() -> None:
    journal = journal_of(request("b"), request("a"), request("c"))
    assert journal.request_ids == ["b", "a", "c"]
    assert len(journal) == 3
    assert "a" in journal
    assert "d" not in journal


def test_an_id_in_use_is_refused_and_the_first_request_stays() -> None:
    first = request("a", earlier=(5,))
    journal = journal_of(first)
    assert journal.add(request("a", earlier=(6,))) is False
    assert journal.resumed("a") == first


def test_a_request_goes_on_with_the_tokens_that_it_had_and_those_noted_since() -> None:
    journal = journal_of(request("a", earlier=(5, 6)), request("b"))
    journal.note([EngineCoreOutput("a", [7]), EngineCoreOutput("gone", [9]), EngineCoreOutput("b", [8])])
    journal.note([EngineCoreOutput("a", [2**32 - 1, 0])])
    assert journal.resumed("a") == replace(request("a"), output_token_ids=(5, 6, 7, 2**32 - 1, 0))
    assert journal.resumed("b") == replace(request("b"), output_token_ids=(8,))


def test_a_fork_goes_on_as_a_request_of_its_own() -> None:
    journal = journal_of(request("a"), request("b", fork_of="a"))
    assert journal.resumed("b") == request("b")
    assert journal.followers("a") == []
    assert journal.group("b") == ["b"]
    assert not journal.is_follower("b")


def test_a_request_that_ended_is_forgotten_and_the_others_are_not() -> None:
    journal = journal_of(request("a"), request("b"))
    journal.note([EngineCoreOutput("a", [3], finish_reason=FinishReason.STOP), EngineCoreOutput("b", [4])])
    assert journal.request_ids == ["b"]
    assert journal.resumed("b") == replace(request("b"), output_token_ids=(4,))


def test_those_forgotten_are_named_once_and_only_if_they_were_in_flight() -> None:
    journal = journal_of(request("a"), request("b"), request("c"))
    assert journal.forget(["c", "gone", "a", "c"]) == ["c", "a"]
    assert journal.request_ids == ["b"]


def test_a_whole_beam_search_starts_again() -> None:
    beams = [request("a", num_beams=3), request("b", num_beams=3, fork_of="a"), request("c", num_beams=3, fork_of="a")]
    journal = journal_of(*beams, request("other", num_beams=2))
    journal.note([EngineCoreOutput("a", [3])])
    assert journal.followers("a") == ["b", "c"]
    assert [journal.resumed(one.request_id) for one in beams] == beams
    assert [journal.is_follower(name) for name in ("a", "b", "c", "gone")] == [False, True, True, False]
    assert journal.resumed("other") is None, "its second beam is not there"
    assert [journal.group(one.request_id) for one in beams] == [["a", "b", "c"]] * 3
    assert journal.group("other") == ["other"]


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_beam_search_that_lost_a_beam_does_not_go_on(gone: str) -> None:
    journal = journal_of(request("a", num_beams=2), request("b", num_beams=2, fork_of="a"))
    journal.forget([gone])
    left = "b" if gone == "a" else "a"
    assert journal.resumed(left) is None
    assert journal.group(left) == [left]
    assert not journal.is_follower(left)
