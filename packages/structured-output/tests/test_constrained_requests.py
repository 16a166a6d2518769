"""The requests of an engine, by id."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_structured_output import ConstrainedRequests, ConstraintFailedError
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID
from llmstack_types import InvalidRequestError, StructuredOutputsParams

EOS = (EOS_TOKEN_ID,)


@pytest.fixture
def requests(folder: Path) -> ConstrainedRequests:
    return ConstrainedRequests(str(folder), BYTE_VOCAB_SIZE, num_threads=2)


def masks(requests: ConstrainedRequests, *rows: tuple[str, bytes]) -> list[str]:
    """What each mask allows, `$` for the end, `*` for anything."""
    bits = requests.masks(rows)
    size = requests.mask_bytes
    assert len(bits) == size * sum(1 + len(drafts) for _, drafts in rows)
    return [_spell(bytes(bits[start : start + size])) for start in range(0, len(bits), size)]


def _spell(mask: bytes) -> str:
    allowed = [token_id for token_id in range(BYTE_VOCAB_SIZE) if mask[token_id // 8] >> token_id % 8 & 1]
    if len(allowed) == BYTE_VOCAB_SIZE:
        return "*"
    return "".join("$" if token_id == EOS_TOKEN_ID else chr(token_id) for token_id in allowed)


def test_each_request_is_followed_by_itself(requests: ConstrainedRequests) -> None:
    requests.start("a", StructuredOutputsParams(choice=("xy", "xz")), EOS)
    requests.start("b", StructuredOutputsParams(regex="[pq]r?"), EOS)
    assert masks(requests, ("a", b""), ("b", b"")) == ["x", "pq"]
    requests.accept("a", b"x")
    requests.accept("b", b"q")
    assert masks(requests, ("b", b""), ("a", b"")) == ["r$", "yz"]
    requests.accept("b", b"r")
    assert masks(requests, ("b", b"")) == ["$"]
    requests.end("b")
    requests.end("b")
    requests.accept("b", b"r")
    assert len(requests) == 1


def test_masks_behind_drafts_change_nothing(requests: ConstrainedRequests) -> None:
    requests.start("a", StructuredOutputsParams(regex="ab?c"), EOS)
    requests.start("b", StructuredOutputsParams(regex="xyz"), EOS)
    rows = [("a", b"abx"), ("b", b""), ("b2", b"x")]
    requests.start("b2", StructuredOutputsParams(regex="xyz"), EOS)
    expected = ["a", "bc", "c", "*", "x", "x", "y"]
    assert masks(requests, *rows) == expected
    assert masks(requests, *rows) == expected


def test_the_end_waits_for_min_tokens_unless_nothing_else_may_follow(requests: ConstrainedRequests) -> None:
    requests.start("a", StructuredOutputsParams(regex="ab*"), EOS, 3)
    requests.start("b", StructuredOutputsParams(regex="a"), EOS, 3)
    for request_id in ("a", "b"):
        requests.accept(request_id, b"a")
    assert masks(requests, ("a", b""), ("b", b"")) == ["b", "$"]
    assert masks(requests, ("a", b"bbb")) == ["b", "b", "b$", "b$"]
    requests.accept("a", b"bb")
    assert masks(requests, ("a", b"")) == ["b$"]


def test_a_request_that_fails_says_why_and_has_no_mask(requests: ConstrainedRequests) -> None:
    requests.start("a", StructuredOutputsParams(regex="ab"), EOS)
    requests.start("b", StructuredOutputsParams(regex="xyz"), EOS)
    with pytest.raises(ConstraintFailedError, match=r"\S"):
        requests.accept("a", b"z")
    with pytest.raises(ConstraintFailedError, match=r"\S"):
        requests.masks([("b", b""), ("a", b"")])
    assert masks(requests, ("b", b"")) == ["x"]


def test_nothing_is_followed_of_a_constraint_that_is_refused(requests: ConstrainedRequests) -> None:
    with pytest.raises(InvalidRequestError):
        requests.compile(StructuredOutputsParams(regex="["), EOS)
    with pytest.raises(InvalidRequestError):
        requests.start("a", StructuredOutputsParams(regex="["), EOS)
    assert len(requests) == 0
    assert masks(requests) == []
