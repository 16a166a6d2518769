"""Drafts by suffixes: what a scan of all texts would count, bounded memory, and nothing of another owner."""

from collections import Counter

import pytest
from core_scheduler_helpers.counted import most_read_per_step
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig, SpeculativeConfig
from llmstack_core_scheduler.kept_answers import KeptAnswers
from llmstack_core_scheduler.suffix_drafts import SuffixDrafts
from llmstack_core_scheduler.suffix_index import MAX_NUM_OCCURRENCES, SuffixIndex
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams

OWNER, OTHER = ("a", ""), ("b", "")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def make_drafts(depth=24, num_answers=100, factor=1.0, chance=0.1, **options):
    config = SpeculativeConfig(
        "suffix", 24, suffix_decoding_max_tree_depth=depth, suffix_decoding_max_cached_requests=num_answers,
        suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=chance,
    )  # fmt: skip
    return SuffixDrafts(config, **options)


def common_end(left, right, longest):
    length = 0
    while length < min(len(left), len(right), longest) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def find(texts, token_ids, longest, has_ends):
    """The plain definition: places behind a common end of two tokens at least, the latest first, by its length.

    `has_ends`: Whether the texts are complete, so that their ends are what followed there.
    """
    places = [(text, place) for text in reversed(texts) for place in range(len(text) - 1 + has_ends, 1, -1)]
    lengths = [common_end(text[:place], token_ids, longest) for text, place in places]
    found = [(length, *place) for length, place in zip(lengths, places, strict=True) if length > 1]
    return sorted(found[:MAX_NUM_OCCURRENCES], key=lambda one: -one[0])


def follow(places, own, limit, chance):
    product, score, draft = 1.0, 0.0, []
    while len(draft) < limit:
        texts = [([*text, *draft] if text is own else text, place + len(draft)) for text, place in places]
        following = [text[place] if place < len(text) else None for text, place in texts]
        counts = Counter(token_id for token_id in following if token_id is not None)
        if not counts:
            break
        token_id = next(one for one in following if counts[one] == max(counts.values()))
        product *= counts[token_id] / len(places)
        if product < chance:
            break
        score, draft = score + product, [*draft, token_id]
        places = [place for place, one in zip(places, following, strict=True) if one == token_id]
    return score, draft


def expected_drafts(own, answers, limit, factor=1.0, chance=0.1, depth=24):
    best = (0.0, [])
    for texts, has_ends in (([own], False), (answers, True)):
        found = find(texts, own, int(depth / (1 + factor)), has_ends)
        for length in sorted({one[0] for one in found}, reverse=True):
            places = [(text, place) for matched, text, place in found if matched >= length]
            draft = follow(places, own, min(limit, int(length * factor)), chance)
            best = draft if draft[0] > best[0] else best
    return best[1]


@given(
    own=TOKENS, answers=st.lists(TOKENS, max_size=4), cuts=st.lists(st.integers(1, 60), max_size=5),
    limit=st.integers(1, 9), factor=st.sampled_from([0.5, 1.0, 2.0]), chance=st.sampled_from([0.0, 0.1, 0.6]),
)  # fmt: skip
def test_an_index_that_grows_proposes_what_a_scan_counts(own, answers, cuts, limit, factor, chance):
    drafts = make_drafts(factor=factor, chance=chance)
    for answer in answers:
        drafts.learn(OWNER, answer)
        drafts.learn(OTHER, answer[::-1])
    kept = [answer for answer in answers if len(answer) > 2]
    for cut in sorted({min(cut, len(own)) for cut in [*cuts, len(own)]}):
        found = drafts.propose("r", own[:cut], limit, OWNER)
        assert found == expected_drafts(own[:cut], kept, limit, factor, chance)


@given(texts=st.lists(TOKENS, min_size=1, max_size=12), num_dropped=st.integers(0, 11), asked=TOKENS)
def test_an_index_without_its_first_texts_is_one_of_the_others(texts, num_dropped, asked):
    whole, rest = SuffixIndex(), SuffixIndex()
    for number, text in enumerate(texts):
        whole.extend([*text, -1])
        if number >= num_dropped:
            rest.extend([*text, -1])
    for text in texts[:num_dropped]:
        whole.drop(len(text) + 1)
    assert [(one.end - whole.start, one.length) for one in whole.find(asked, 12)] == rest.find(asked, 12)
    assert len(whole._pair_to_end) <= len(rest._token_ids)


def test_answers_of_another_tenant_or_salt_are_not_looked_at():
    drafts = make_drafts()
    drafts.learn(OWNER, [1, 2, 3, 4, 5])
    assert drafts.propose("r", [1, 2], 5, OWNER) == [3, 4]
    assert drafts.propose("s", [1, 2], 5, OTHER) == []
    assert drafts.propose("t", [1, 2], 5, (OWNER[0], "salt")) == []


def test_counts_decide_which_token_follows_and_how_many():
    drafts = make_drafts()
    for _ in range(3):
        drafts.learn(OWNER, [1, 2, 3, 4, 5, 6])
    drafts.learn(OWNER, [1, 2, 3, 9, 9, 9])
    assert drafts.propose("r", [1, 2, 3], 9, OWNER) == [4, 5, 6]
    sure = make_drafts(chance=0.8)
    sure.answers = drafts.answers
    assert sure.propose("r", [1, 2, 3], 9, OWNER) == []
    assert sure.propose("s", [7, 1, 2], 9, OWNER) == [3]


def test_the_oldest_answers_make_room_and_none_are_kept_where_there_is_none():
    drafts = make_drafts(num_answers=2)
    for first in (10, 20, 30):
        drafts.learn(OWNER, [first, first + 1, first + 2])
    assert [drafts.propose(f"{first}", [first, first + 1], 1, OWNER) for first in (10, 20, 30)] == [[], [22], [32]]
    small = make_drafts(max_num_kept_tokens=8)
    for number in range(20):
        small.learn((str(number), ""), list(range(number, number + 30)))
        assert small.answers.num_tokens <= 8
    assert [owner for owner, _ in small.answers] == [("19", "")]
    none = make_drafts(num_answers=0)
    none.learn(OWNER, [1, 2, 3, 4])
    assert none.propose("r", [1, 2], 3, OWNER) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("", "s")), st.integers(3, 9)), max_size=60))
def test_a_busy_tenant_pushes_out_no_answer_of_one_with_less(asked):
    kept = KeptAnswers(8, 40)
    for number, (tenant, salt, length) in enumerate(asked):
        before = Counter({name: sum(len(ids) + 1 for (one, _), ids in kept if one == name) for name in "abc"})
        kept.add((tenant, salt), [number] * length)
        after = Counter({name: sum(len(ids) + 1 for (one, _), ids in kept if one == name) for name in "abc"})
        before[tenant] += length + 1
        lost = [name for name in "abc" if after[name] < before[name]]
        assert all(before[name] >= max(after.values()) for name in lost)
        assert kept.num_tokens == sum(after.values()) <= 40
        assert len(list(kept)) <= 8
    again = KeptAnswers(8, 40)
    for owner, token_ids in kept:
        again.add(owner, token_ids)
    assert list(again) == list(kept)


def test_a_request_without_room_for_its_index_has_drafts_by_answers():
    drafts = make_drafts(max_num_indexed_tokens=6)
    text = [1, 2, 3, 1, 2]
    assert drafts.propose("a", text, 1, OWNER) == [3]
    assert drafts.propose("b", text, 1, OWNER) == []
    drafts.learn(OWNER, [1, 2, 8])
    assert drafts.propose("b", text, 1, OWNER) == [8]
    drafts.forget("a")
    drafts.forget("a")
    assert drafts.num_indexed_tokens == 0
    assert drafts.propose("b", text, 1, OWNER) == [3]


def test_each_step_reads_as_many_tokens_whatever_the_length():
    assert most_read_per_step(make_drafts(), 3, OWNER) < 16 * 12


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_scheduler_learns_answers_that_are_complete(is_aborted):
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, speculative=SpeculativeConfig("suffix", 4))
    scheduler = Scheduler(config, FakeKVCacheManager(40, 4))
    found = []
    for name in "ab":
        scheduler.add_request(EngineCoreRequest(name, [9, 1], SamplingParams(max_tokens=5), tenant="t"))
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule(0.0)
            tokens = []
            for row in scheduled.scheduled_requests:
                num_known = row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids)
                found += [(name, draft) for draft in row.draft_token_ids]
                tokens.append([num_known + place for place in range(len(row.draft_token_ids) + 1)])
            scheduler.update_from_output(
                scheduled, ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], tokens), 0.0
            )
            if is_aborted and len(scheduled.scheduled_requests) and max(map(max, tokens)) > 4:
                scheduler.abort_requests([name])
    # The tokens of both answers are 2, 3, 4, 5 and 6.
    assert found == ([] if is_aborted else [("b", 4), ("b", 5)])


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tree_depth", 2), ("max_cached_requests", -1), ("max_spec_factor", float("nan")), ("min_token_prob", 1.5)],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"suffix_decoding_{name} must be"):
        SpeculativeConfig("suffix", 4, **{f"suffix_decoding_{name}": value})
