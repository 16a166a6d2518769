"""An item that every token attends to is held to the end of its request, and shared by all that ask about it."""

from dataclasses import replace
from hashlib import sha256

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.adapter_places import MAX_NUM_OVERTAKERS
from llmstack_core_scheduler.testing import FakeEncoder, FakeKVCacheManager, FakeModelRunner, next_token, seen_ids
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaSpec, SamplingParams

SPEC = MediaSpec(8, {"audio": 2}, max_num_tokens={"audio": 10}, has_cross_attention=True)


def request(name, sound, priority=0, max_tokens=5, num_units=10):
    item = MediaItem(sha256(sound.encode()).digest(), "audio", 0, 1, num_units=num_units)
    return EngineCoreRequest(name, [7, 1, 2], SamplingParams(max_tokens=max_tokens), media=(item,), priority=priority)


class Rig:
    def __init__(self, room, policy="fcfs", spec=SPEC, budget=0):
        config = SchedulerConfig(
            max_num_seqs=4, max_model_len=32, max_num_batched_tokens=32, media=spec, encoder_cache_tokens=room,
            policy=policy, encoder_budget_units=budget,
        )  # fmt: skip
        self.scheduler = Scheduler(config, FakeKVCacheManager(64, 4))
        self.runner = FakeModelRunner(64, 4, encoder=FakeEncoder(spec))
        self.answers, self.ends = {}, []

    def step(self):
        scheduled = self.scheduler.schedule(0.0)
        for message in self.scheduler.update_from_output(scheduled, self.runner.execute_model(scheduled), 0.0).outputs:
            self.answers.setdefault(message.request_id, []).extend(message.new_token_ids)
            if message.finish_reason is not None:
                self.ends.append(message.request_id)
        return scheduled

    def run(self, *requests):
        for one in requests:
            self.scheduler.add_request(one)
        while self.scheduler.has_unfinished_requests():
            self.step()
        for one in requests:
            text, answer = seen_ids(one.prompt_token_ids, one.media), []
            while len(answer) < one.sampling_params.max_tokens:
                answer.append(next_token(text + answer))
            assert self.answers[one.request_id] == answer
        return self.scheduler.stats().encoder


def test_one_encoding_serves_all_that_is_asked_of_a_sound():
    stats = Rig(room=20).run(request("a", "x"), request("b", "x"), request("c", "y"), request("d", "x"))
    assert (stats.num_encoded, stats.num_evictions, stats.num_hits) == (2, 0, 2)


def test_a_request_waits_where_the_room_is_held():
    rig = Rig(room=10)
    stats = rig.run(request("a", "x"), request("b", "y"))
    assert rig.ends == ["a", "b"]
    assert (stats.num_encoded, stats.num_evictions, stats.num_repeats) == (2, 1, 0)


def test_a_request_that_runs_keeps_its_room_from_one_that_goes_before_it():
    rig = Rig(room=10, policy="priority")
    rig.scheduler.add_request(request("late", "x", priority=1, max_tokens=9))
    rig.step()
    stats = rig.run(request("first", "y"))
    assert rig.ends == ["late", "first"]
    assert (stats.num_encoded, stats.num_repeats) == (2, 0)


def layers_beside_a_stream(num_waiting, budget):
    """Layers of a sound in each step beside one request that decodes, and before others that wait for theirs."""
    spec = replace(SPEC, num_layers={"audio": 40}, max_num_tokens={"audio": 20}, step_units=1)
    rig = Rig(room=200, spec=spec, budget=budget)
    rig.scheduler.add_request(request("stream", "x", max_tokens=25, num_units=20))
    while not rig.answers:
        rig.step()
    for number in range(num_waiting):
        rig.scheduler.add_request(request(f"w{number}", f"w{number}", num_units=20))
    return [sum(part.num_layers for part in rig.step().encoder_work) for _ in range(3)]


def test_a_step_encodes_more_where_more_wait_for_their_sound_than_decode():
    assert layers_beside_a_stream(num_waiting=1, budget=0) == [2, 2, 2]
    assert layers_beside_a_stream(num_waiting=3, budget=0) == [16, 16, 16]
    assert layers_beside_a_stream(num_waiting=3, budget=1) == [2, 2, 2]  # what was asked for


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_steady_flow_about_one_sound_lets_another_one_in(policy):
    rig = Rig(room=10, policy=policy)
    for number in range(200):
        rig.scheduler.add_request(request(f"x{number}", "x"))
        if number == 2:
            rig.scheduler.add_request(request("y", "y"))
        rig.step()
    assert "y" in rig.ends
    assert rig.ends.index("y") <= 2 + MAX_NUM_OVERTAKERS + 4
    rig.run()
    assert len(rig.ends) == 201


@pytest.mark.parametrize("places", [[], [(0, 1), (1, 1)], [(1, 1)], [(0, 2)]])
def test_a_prompt_has_one_item_at_its_beginning(places):
    media = tuple(MediaItem(bytes(32), "audio", *place, num_units=10) for place in places)
    with pytest.raises(InvalidRequestError) as caught:
        Rig(room=10).scheduler.add_request(EngineCoreRequest("a", [7, 7, 1], SamplingParams(), media=media))
    assert caught.value.param.startswith("media")
