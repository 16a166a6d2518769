"""The work of the encoder keeps its budget and its room, and holds no request up for ever."""

from dataclasses import replace
from hashlib import sha256

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig, media_numbers
from llmstack_core_scheduler.media_numbers import MediaNumbers, media_keys
from llmstack_core_scheduler.testing import (
    FakeEncoder,
    FakeKVCacheManager,
    FakeModelRunner,
    WrongMediaError,
    next_token,
    seen_ids,
)
from llmstack_types import (
    EncoderWork,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    MediaItem,
    MediaMemory,
    MediaSpec,
    PrefixMedia,
    SamplingParams,
    SchedulerOutput,
)

SPEC = MediaSpec(8, {"image": 4, "embeds": 0}, max_num_tokens={"image": 8, "embeds": 8})


ATOMIC = replace(SPEC, max_num_tokens={"image": 8}, is_atomic=True)


def picture(name, offset, num_tokens=4, num_units=10, **changes):
    digest = sha256(name.encode()).digest()
    return MediaItem(digest, "image", offset, num_tokens, num_units=num_units, **changes)


def vectors(name, offset, num_tokens=4):
    return MediaItem(sha256(name.encode()).digest(), "embeds", offset, num_tokens)


def request(name, *media, length=None, max_tokens=3, **changes):
    length = length or max((item.end for item in media), default=0) + 2
    prompt = [*range(1, length + 1)]
    for item in media:
        prompt[item.offset : item.end] = [7] * item.num_tokens
    return EngineCoreRequest(name, prompt, SamplingParams(max_tokens=max_tokens), media=media, **changes)


class Rig:
    def __init__(self, num_blocks=64, broken=(), media=SPEC, **changes):
        changes = {"max_num_batched_tokens": 32, "encoder_cache_tokens": 8, "encoder_budget_units": 10} | changes
        config = SchedulerConfig(max_num_seqs=4, max_model_len=96, media=media, **changes)
        self.manager = FakeKVCacheManager(num_blocks, 4)
        self.scheduler = Scheduler(config, self.manager)
        self.encoder = FakeEncoder(media or MediaSpec(0, {}), broken)
        self.runner = FakeModelRunner(num_blocks, 4, encoder=self.encoder)
        self.answers, self.ends, self.steps = {}, {}, []

    def add(self, *requests):
        for one in requests:
            self.scheduler.add_request(one)

    def step(self):
        scheduled = self.scheduler.schedule(0.0)
        self.steps.append(scheduled)
        for message in self.scheduler.update_from_output(scheduled, self.runner.execute_model(scheduled), 0.0).outputs:
            self.answers.setdefault(message.request_id, []).extend(message.new_token_ids)
            if message.finish_reason is not None:
                self.ends[message.request_id] = message.finish_reason
        return scheduled

    def run(self, max_steps=200):
        while self.scheduler.has_unfinished_requests():
            self.step()
            max_steps -= 1
            assert max_steps, "it comes to no end"
        return self.answers

    @property
    def stats(self):
        return self.scheduler.stats().encoder


def right_answer(one):
    text = seen_ids(one.prompt_token_ids, one.media)
    answer = []
    while len(answer) < one.sampling_params.max_tokens:
        answer.append(next_token(text + answer))
    return answer


def parts_of(scheduled):
    return [(part.media_id, part.first_layer, part.num_layers) for part in scheduled.encoder_work]


def test_an_item_is_encoded_whole_beside_no_stream_and_used_in_the_same_step():
    rig, one = Rig(), request("a", picture("cat", 3))
    rig.add(one)
    first = rig.step()
    assert parts_of(first) == [(1, 0, 4)]
    assert [row.num_scheduled_tokens for row in first.scheduled_requests] == [9]
    assert first.encoder_work[0].item == one.media[0]
    assert rig.run()["a"] == right_answer(one)


def test_beside_a_stream_an_item_takes_as_many_steps_as_its_budget_asks_for():
    rig, text, one = Rig(encoder_budget_units=5), request("t", length=4, max_tokens=9), request("a", picture("cat", 3))
    rig.add(text)
    rig.step()
    rig.add(one)
    rows = [[(row.request_id, row.num_scheduled_tokens) for row in rig.step().scheduled_requests] for _ in range(2)]
    assert rows == [[("t", 1), ("a", 3)], [("t", 1), ("a", 6)]]
    assert [parts_of(step) for step in rig.steps[1:]] == [[(1, 0, 2)], [(1, 2, 2)]]
    assert rig.steps[2].encoder_work[0].item is None
    answers = rig.run()
    assert answers == {"t": right_answer(text), "a": right_answer(one)}


def test_a_prompt_that_begins_with_an_item_runs_without_a_row_until_it_is_encoded():
    rig, text, one = Rig(encoder_budget_units=1), request("t", length=4, max_tokens=9), request("a", picture("cat", 0))
    rig.add(text)
    rig.step()
    rig.add(one)
    for num_done in range(4):
        scheduled = rig.step()
        assert parts_of(scheduled) == [(1, num_done, 1)]
        assert len(scheduled.scheduled_requests) == (2 if num_done == 3 else 1)
        assert rig.scheduler.stats().num_running == 2
    assert [new.request_id for new in rig.steps[-1].new_requests] == ["a"]
    assert rig.run()["a"] == right_answer(one)


def test_a_step_may_have_encoder_work_alone():
    rig = Rig(encoder_budget_units=1)
    rig.add(request("a", picture("cat", 0, num_units=40)))
    scheduled = rig.step()
    assert parts_of(scheduled) == [(1, 0, 1)]
    assert not scheduled.scheduled_requests
    assert not scheduled.is_empty()


def test_a_text_overtakes_a_prompt_that_the_encoder_has_no_time_for():
    rig = Rig(encoder_budget_units=1)
    rig.add(request("a", picture("cat", 0, num_units=40)), request("b", picture("dog", 0)), request("t", length=4))
    assert [row.request_id for row in rig.step().scheduled_requests] == ["t"]
    assert [one.request_id for one in rig.scheduler.waiting] == ["b"]


@pytest.mark.parametrize("is_swapped", [False, True])
def test_the_same_item_hits_and_another_or_a_swapped_one_misses(is_swapped):
    pair = picture("cat", 0), picture("dog", 4)
    other = (picture("dog", 0), picture("cat", 4)) if is_swapped else (picture("cat", 0), picture("cow", 4))
    rig, first, again, third = Rig(), request("a", *pair), request("b", *pair), request("c", *other)
    rig.add(first)
    rig.run()
    rig.add(again)
    rig.run()
    num_units = rig.stats.num_units
    assert num_units == 20  # of the first alone
    rig.add(third)
    assert rig.run() == {one.request_id: right_answer(one) for one in (first, again, third)}
    cached = {"b": 8, "c": 0 if is_swapped else 4}
    assert rig.manager.get_computed_blocks("", media_keys(again.prompt_token_ids, [(1, pair[0]), (2, pair[1])]))[1] == 8
    assert rig.stats.num_units == (20 if is_swapped else 30)
    assert cached["b"] == 8


def test_items_of_another_salt_are_other_items():
    rig, one = Rig(), request("a", picture("cat", 0))
    rig.add(one, replace(one, request_id="b", cache_salt="other"))
    answers = rig.run()
    assert answers["a"] == answers["b"] == right_answer(one)
    assert rig.stats.num_encoded == 2


def test_two_items_that_do_not_fit_together_are_encoded_one_after_the_other():
    rig, one = Rig(encoder_cache_tokens=6), request("a", picture("cat", 1, 5), picture("dog", 8, 5))
    rig.add(one)
    assert [row.num_scheduled_tokens for row in rig.step().scheduled_requests] == [8]
    second = rig.step()
    assert (second.freed_media, parts_of(second)) == ([1], [(2, 0, 4)])
    assert rig.run()["a"] == right_answer(one)
    assert rig.encoder.most_tokens == 5
    assert (rig.stats.num_evictions, rig.stats.num_repeats) == (1, 0)


def test_the_first_running_request_takes_the_room_of_a_later_one():
    changes = {"encoder_cache_tokens": 6, "long_prefill_token_threshold": 2, "encoder_budget_units": 100}
    rig = Rig(policy="priority", **changes)
    late, early = request("late", picture("dog", 0, 6)), request("early", picture("cat", 2, 6), priority=-1)
    rig.add(early, late)
    assert [parts_of(rig.step()) for _ in range(2)] == [[(2, 0, 4)], [(1, 0, 4)]]
    assert rig.steps[1].freed_media == [2]
    assert [row.request_id for row in rig.steps[1].scheduled_requests] == ["early"]
    assert rig.stats.num_repeats == 1
    assert rig.run() == {"late": right_answer(late), "early": right_answer(early)}


@pytest.mark.parametrize(
    ("changes", "named", "param"),
    [
        ({}, {"num_tokens": 9}, "media[1]"),
        ({"encoder_cache_tokens": 5}, {"num_tokens": 6}, "media[1]"),
        ({}, {"kind": "audio"}, "media[1]"),
        (
            {"media": replace(SPEC, max_num_tokens={"image": 8}, is_atomic=True)},
            {"kind": "embeds", "num_tokens": 9, "num_units": 0},
            "media[1]",
        ),
        ({"media": None}, {}, "media"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 96, "encoder_cache_tokens": 7}, {}, "media"),
    ],
)
def test_an_item_that_never_fits_is_refused_by_name_and_changes_nothing(changes, named, param):
    rig = Rig(**changes)
    before = rig.scheduler.stats()
    items = picture("cat", 0), replace(picture("dog", 4), **named)
    with pytest.raises(InvalidRequestError) as caught:
        rig.scheduler.add_request(request("a", *items, length=20))
    assert caught.value.param == param
    assert rig.scheduler.stats() == before
    assert not rig.scheduler.has_unfinished_requests()


def test_whole_prompts_wait_until_all_of_their_items_are_encoded():
    rig = Rig(enable_chunked_prefill=False, max_num_batched_tokens=96, encoder_budget_units=1)
    one = request("a", picture("cat", 0, num_units=30), vectors("v", 4))
    rig.add(one)
    while not rig.answers:
        rows = [row.num_scheduled_tokens for row in rig.step().scheduled_requests]
        assert rows in ([], [10])
    assert len(rig.steps) > 2
    assert rig.run()["a"] == right_answer(one)


def test_items_that_must_not_be_cut_are_computed_in_one_chunk():
    atomic = replace(SPEC, is_atomic=True)
    rig, one = Rig(media=atomic, max_num_batched_tokens=12), request("a", picture("cat", 6, 8), picture("dog", 15, 6))
    rig.add(one)
    rig.run()
    ends = [row.num_computed_tokens + row.num_scheduled_tokens for step in rig.steps for row in step.scheduled_requests]
    assert ends[:2] == [6, 15]
    assert rig.answers["a"] == right_answer(one)


def test_an_item_under_way_is_dropped_once_no_request_needs_it():
    rig = Rig(encoder_budget_units=1)
    one = request("b", picture("dog", 0, num_units=30))
    rig.add(request("a", picture("cat", 0, num_units=30)))
    rig.step()
    rig.scheduler.abort_requests(["a"])
    rig.add(one)
    scheduled = rig.step()
    assert (scheduled.freed_media, parts_of(scheduled)) == ([1], [(2, 0, 1)])
    assert rig.run() == {"b": right_answer(one)}


def test_an_item_under_way_is_finished_before_one_of_a_request_that_goes_first():
    rig = Rig(encoder_budget_units=1, policy="priority")
    late, early = (
        request("late", picture("cat", 0, num_units=30)),
        request("early", picture("dog", 0, num_units=30), priority=-1),
    )
    rig.add(late)
    rig.step()
    rig.add(early)
    assert parts_of(rig.step()) == [(1, 1, 1)]
    assert (rig.stats.num_parts, rig.stats.num_encoded) == (2, 0)
    assert rig.run() == {"late": right_answer(late), "early": right_answer(early)}
    assert rig.stats.num_encoded == 2


def test_a_broken_item_ends_its_own_requests_and_those_beside_it_start_again():
    rig = Rig(broken=[picture("bad", 0).digest])
    bad, text = request("bad", picture("bad", 8)), request("text", length=30)
    rig.add(bad, text)  # the text finds, in the same step, what the failing row was to write
    assert rig.step().scheduled_requests[1].num_computed_tokens == 8
    assert rig.ends == {"bad": FinishReason.ERROR}
    assert rig.run()["text"] == right_answer(text)
    assert rig.ends["text"] == FinishReason.LENGTH


def test_an_item_that_was_broken_is_encoded_again_for_the_next_request():
    broken = [picture("cat", 0).digest]
    rig, one = Rig(broken=broken), request("a", picture("cat", 0))
    rig.add(one)
    rig.run()
    assert rig.ends == {"a": FinishReason.ERROR}
    broken.clear()
    rig.add(replace(one, request_id="b"))
    assert rig.run()["b"] == right_answer(one)
    assert any(1 in step.freed_media for step in rig.steps)


def test_completions_of_one_prompt_share_its_item():
    rig, one = Rig(), request("a", picture("cat", 0), length=16)
    rig.add(one, *(replace(one, request_id=name, fork_of="a") for name in "bc"))
    assert set(map(tuple, rig.run().values())) == {tuple(right_answer(one))}
    assert (rig.stats.num_encoded, rig.scheduler.stats().num_forks) == (1, 2)


def test_a_fork_of_another_item_is_refused():
    rig, one = Rig(), request("a", picture("cat", 0))
    rig.add(one)
    with pytest.raises(InvalidRequestError, match="prompt of a fork"):
        rig.scheduler.add_request(replace(one, request_id="b", fork_of="a", media=(picture("dog", 0),)))


def test_a_reset_of_the_cache_drops_what_is_encoded():
    rig = Rig()
    rig.add(request("a", picture("cat", 0)))
    rig.run()
    assert rig.stats.num_used_tokens == 4
    assert rig.scheduler.reset_prefix_cache()
    assert rig.stats.num_used_tokens == 0
    rig.add(request("b", picture("cat", 0)))
    assert rig.step().freed_media == [1]


def test_a_scheduler_of_tokens_says_nothing_of_an_encoder():
    assert Rig(media=None).scheduler.stats().encoder is None


def test_states_and_items_that_must_not_be_cut_exclude_each_other():
    kv_cache = pytest.importorskip("llmstack_kv_cache")
    manager = kv_cache.KVCacheManager(16, 4, num_state_blocks=16)
    with pytest.raises(ValueError, match="exclude items"):
        Scheduler(SchedulerConfig(media=replace(SPEC, is_atomic=True)), manager)


def numbers_of(numbers, *requests):
    media = [PrefixMedia(one.cache_salt, one.media) for one in requests]
    named = [numbers.number(one.prompt_token_ids, items) for one, items in zip(requests, media, strict=True)]
    return [[number for number, _ in one] for one in named]


def test_equal_items_of_one_scope_have_one_number():
    numbers, one = MediaNumbers(), request("a", picture("cat", 0), picture("dog", 4), picture("cat", 8))
    moved = request("b", picture("dog", 1))
    assert numbers_of(numbers, one, moved) == [[1, 2, 1], [2]]
    assert numbers_of(numbers, replace(one, cache_salt="s")) == [[3, 4, 3]]
    assert numbers.name_of(2) == (picture("dog", 0).digest, 7)
    assert numbers.name_of(9) is None


@pytest.mark.parametrize("changes", [{"num_units": 11}, {"layout": (2,)}, {"embed_runs": ((1, 3),)}])
def test_an_item_with_other_facts_is_another_one_whatever_its_digest_says(changes):
    numbers = MediaNumbers()
    assert numbers_of(
        numbers, request("a", picture("cat", 0)), request("b", replace(picture("cat", 0), **changes))
    ) == [[1], [2]]


def test_what_is_forgotten_gets_another_number(monkeypatch):
    monkeypatch.setattr(media_numbers, "MAX_KNOWN", 2)
    numbers, cat, dog, cow = MediaNumbers(), *(request(name, picture(name, 0)) for name in ("cat", "dog", "cow"))
    assert numbers_of(numbers, cat, dog, cat, cow, cat, dog) == [[1], [2], [1], [3], [1], [4]]
    assert numbers.name_of(2) is None


def test_numbers_come_to_an_end_with_a_sentence(monkeypatch):
    monkeypatch.setattr(media_numbers, "_LAST_NUMBER", 1)
    numbers = MediaNumbers()
    with pytest.raises(InvalidRequestError, match="start it again"):
        numbers_of(numbers, request("a", picture("cat", 0), picture("dog", 4)))
    assert numbers_of(numbers, request("a", picture("cat", 0))) == [[1]]


def test_a_number_travels_without_the_memory_of_its_item():
    rig = Rig()
    rig.add(request("a", picture("cat", 0, memory=MediaMemory(3, data=b"abc"))))
    scheduled = rig.step()
    assert scheduled.new_requests[0].media[0][1].memory is None
    assert scheduled.encoder_work[0].item.memory.data == b"abc"


def test_keys_stand_where_vectors_do():
    item = picture("cat", 1, 4, embed_runs=((0, 1), (2, 2)))
    assert media_keys([5, 7, 9, 7, 7, 6], [(3, item)]) == [5, -4, 9, -4, -4, 6]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([SchedulerOutput(1, freed_media=[3])], "freed"),
        ([SchedulerOutput(1, encoder_work=[EncoderWork(1, 1, 1)])], "follows"),
        ([SchedulerOutput(1, encoder_work=[EncoderWork(1, 0, 5, picture("cat", 0))])], "layers"),
        ([SchedulerOutput(1, encoder_work=[EncoderWork(n, 0, 1, picture("cat", 0)) for n in (1, 2)])], "begun"),
        ([SchedulerOutput(1, encoder_work=[EncoderWork(1, 0, 0, vectors("v", 0))])] * 2, "has its vectors"),
    ],
)
def test_work_that_does_not_follow_is_found(steps, text):
    encoder = FakeEncoder(SPEC)
    with pytest.raises(WrongMediaError, match=text):
        [encoder.follow(replace(step)) for step in steps]
