"""Prompt lookup: an index that grows says what a scan of all tokens would say."""

import pytest
from core_scheduler_helpers.counted import most_read_per_step
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import SpeculativeConfig
from llmstack_core_scheduler.ngram_drafts import NgramDrafts

OWNER = ("", "")


def make_drafts(longest=4, shortest=2, **options):
    return NgramDrafts(SpeculativeConfig("ngram", 5, longest, shortest), **options)


def scan(token_ids, longest, shortest, num_tokens):
    """The plain definition: longest n-gram first, its latest place first, and then on from there, token by token."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(token_ids) >= length and token_ids[end - length : end] == token_ids[-length:]:
                text = list(token_ids)
                for place in range(num_tokens):
                    text.append(text[end + place])
                return text[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    cuts=st.lists(st.integers(1, 80), max_size=8),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    num_tokens=st.integers(1, 7),
)
def test_a_growing_index_finds_what_a_scan_finds(token_ids, cuts, lengths, num_tokens):
    shortest, longest = lengths
    drafts = make_drafts(longest, shortest)
    for cut in sorted({min(cut, len(token_ids)) for cut in [*cuts, len(token_ids)]}):
        known = token_ids[:cut]
        assert drafts.propose("a", known, num_tokens, OWNER) == scan(known, longest, shortest, num_tokens)


def test_the_longest_match_goes_before_a_later_one():
    token_ids = [1, 2, 3, 10, 8, 2, 3, 20, 1, 2, 3]
    assert make_drafts().propose("a", token_ids, 2, OWNER) == [10, 8]
    assert make_drafts(longest=2).propose("a", token_ids, 2, OWNER) == [20, 1]


def test_what_repeats_itself_is_taken_to_go_on():
    assert make_drafts().propose("a", [5, 6, 7, 5, 6], 7, OWNER) == [7, 5, 6, 7, 5, 6, 7]
    assert make_drafts().propose("a", [5, 5, 5], 4, OWNER) == [5, 5, 5, 5]


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_nothing_is_guessed_where_nothing_repeats(token_ids):
    assert make_drafts().propose("a", token_ids, 5, OWNER) == []


def test_requests_do_not_see_each_other_and_a_forgotten_id_begins_again():
    drafts = make_drafts()
    drafts.propose("a", [1, 2, 3, 4], 2, OWNER)
    assert drafts.propose("b", [1, 2], 2, OWNER) == []
    drafts.forget("a")
    drafts.forget("a")
    assert drafts.propose("a", [1, 2], 2, OWNER) == []


def test_a_full_index_guesses_nothing_until_others_have_ended():
    drafts = make_drafts(max_num_indexed_tokens=10)
    text = [1, 2, 3, 1, 2]
    assert drafts.propose("a", text, 1, OWNER)
    assert drafts.propose("b", text, 1, OWNER)
    assert drafts.propose("a", [*text, 3], 1, OWNER) == []
    assert drafts.propose("c", text, 1, OWNER) == []
    drafts.forget("b")
    assert drafts.propose("a", [*text, 3], 1, OWNER) == [1]


def test_each_step_reads_as_many_tokens_whatever_the_length():
    assert most_read_per_step(make_drafts(), 7, OWNER) < 60
