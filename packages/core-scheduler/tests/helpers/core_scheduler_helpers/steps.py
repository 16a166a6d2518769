"""Requests, small schedulers, and one step of one of them."""

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
)


def make_request(request_id, num_tokens, max_tokens=100, **kwargs):
    params = kwargs.pop("params", SamplingParams(max_tokens=max_tokens))
    prompt = kwargs.pop("prompt", [hash_of(request_id, position) for position in range(num_tokens)])
    return EngineCoreRequest(request_id, prompt, params, **kwargs)


def hash_of(request_id, position):
    return sum(map(ord, request_id)) * 1000 + position


def make_scheduler(num_blocks=100, block_size=16, **config):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    return Scheduler(SchedulerConfig(**(defaults | config)), FakeKVCacheManager(num_blocks, block_size))


def rows_of(scheduled):
    return {row.request_id: row.num_scheduled_tokens for row in scheduled.scheduled_requests}


def answer(scheduled, **tokens):
    """What a runner would return: a token for each row that samples, 7 unless `tokens` names another."""
    rows = scheduled.scheduled_requests
    return ModelRunnerOutput([row.request_id for row in rows], [[tokens.get(row.request_id, 7)] for row in rows])


def step(scheduler, **tokens):
    """One whole step; the rows and the messages by request id."""
    scheduled = scheduler.schedule(0.0)
    messages = scheduler.update_from_output(scheduled, answer(scheduled, **tokens), 0.0).outputs
    return rows_of(scheduled), {message.request_id: message for message in messages}


def status_of(scheduler):
    return {request.request_id: request.status for request in [*scheduler.running, *scheduler.waiting]}


def preempting_scheduler(**config):
    """Two requests of 16 tokens fill a pool of 3 blocks; both need another one in the next step."""
    scheduler = make_scheduler(num_blocks=3, **config)
    scheduler.add_request(make_request("old", 16, max_tokens=20, priority=1))
    scheduler.add_request(make_request("young", 16, max_tokens=20, priority=0))
    step(scheduler, old=1, young=2)
    return scheduler
