"""The fakes are good enough to be trusted, and the check finds managers that are not."""

import pytest

from llmstack_core_scheduler.testing import (
    FakeKVCacheManager,
    FakeModelRunner,
    WrongKVError,
    check_kv_cache_manager,
    next_token,
)
from llmstack_types import NewRequest, SamplingParams, ScheduledRequest, SchedulerOutput


def test_the_fake_manager_passes_the_check():
    check_kv_cache_manager(FakeKVCacheManager)


class ForgetsSalt(FakeKVCacheManager):
    def get_computed_blocks(self, request_id, token_ids, salt=""):
        return super().get_computed_blocks(request_id, token_ids, "s")


class HitsAllTokens(FakeKVCacheManager):
    def get_computed_blocks(self, request_id, token_ids, salt=""):
        return super().get_computed_blocks(request_id, [*token_ids, 0], salt)


class Leaks(FakeKVCacheManager):
    def free(self, request_id):
        pass


@pytest.mark.parametrize("manager", [ForgetsSalt, HitsAllTokens, Leaks])
def test_the_check_finds_what_is_wrong(manager):
    with pytest.raises(AssertionError, match="expected"):
        check_kv_cache_manager(manager)


def new(request_id, token_ids):
    return NewRequest(request_id, token_ids, len(token_ids), SamplingParams())


def test_the_fake_runner_finds_a_row_that_reads_what_is_not_its_own():
    runner = FakeModelRunner(num_blocks=4, block_size=2)
    good = [ScheduledRequest("a", 0, 3, [0, 1])]
    assert runner.execute_model(SchedulerOutput(1, [new("a", [1, 2, 3])], good)).sampled_token_ids == [
        [next_token([1, 2, 3])]
    ]
    shared = [ScheduledRequest("b", 2, 1, [0, 2])]
    assert runner.execute_model(SchedulerOutput(2, [new("b", [1, 2, 9])], shared)).sampled_token_ids == [
        [next_token([1, 2, 9])]
    ]
    wrong = [ScheduledRequest("c", 2, 1, [0, 3])]
    with pytest.raises(WrongKVError, match="position 0"):
        runner.execute_model(SchedulerOutput(3, [new("c", [5, 2, 9])], wrong))


def test_the_fake_runner_finds_rows_that_were_not_dropped_and_tokens_that_are_not_there():
    runner = FakeModelRunner(num_blocks=4, block_size=2)
    runner.execute_model(SchedulerOutput(1, [new("a", [1])], [ScheduledRequest("a", 0, 1, [0])]))
    with pytest.raises(WrongKVError, match="row already"):
        runner.execute_model(SchedulerOutput(2, [new("a", [1])]))
    with pytest.raises(WrongKVError, match="computes up to"):
        runner.execute_model(SchedulerOutput(3, [], [ScheduledRequest("a", 1, 2, [1])]))
