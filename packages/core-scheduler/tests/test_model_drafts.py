"""Drafts that the model runner makes: places without tokens, from the first output token on."""

from dataclasses import replace

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig, SpeculativeConfig
from llmstack_core_scheduler.draft_lengths import DraftLengths
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import EngineCoreRequest, ModelRunnerOutput, SamplingParams
from llmstack_types.scheduler_output import DRAFT_TO_MAKE

CONFIG = SpeculativeConfig("draft_model", 3, model="small")


def make_scheduler(speculative=CONFIG):
    config = SchedulerConfig(max_num_batched_tokens=64, max_model_len=64, speculative=speculative)
    return Scheduler(config, FakeKVCacheManager(40, 4))


def test_a_prompt_has_no_drafts_and_every_later_row_has_places_for_them():
    scheduler = make_scheduler()
    scheduler.add_request(EngineCoreRequest("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=6)))
    found = []
    for sampled in ([7], [8, 9], [10]):
        scheduled = scheduler.schedule(0.0)
        (row,) = scheduled.scheduled_requests
        found.append((row.num_computed_tokens, row.num_scheduled_tokens, list(row.draft_token_ids)))
        scheduler.update_from_output(scheduled, ModelRunnerOutput(["a"], [sampled]), 0.0)
    assert found == [(0, 5, []), (5, 4, [DRAFT_TO_MAKE] * 3), (7, 3, [DRAFT_TO_MAKE] * 2)]
    stats = scheduler.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 1)


@pytest.mark.parametrize(("draft_cost", "num_drafts"), [(0.05, 8), (0.3, 4), (0.6, 1), (1.0, 0)])
def test_a_model_that_costs_more_makes_fewer_drafts(draft_cost, num_drafts):
    config = replace(CONFIG, num_speculative_tokens=8, is_adaptive=True, draft_cost=draft_cost)
    assert DraftLengths(config).limit("a", 8, 1, 1) == num_drafts


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"method": "draft_model"}, "model must be given with the methods draft_model, eagle, eagle3, medusa"),
        ({"method": "ngram", "model": "m"}, "and no other, got 'm' with 'ngram'"),
        ({"method": "draft_model", "model": "m", "draft_cost": -1.0}, "draft_cost must be at least 0"),
        ({"method": "eagle2"}, "method must be one of ngram, suffix, .*, got 'eagle2'"),
    ],
)
def test_a_contradiction_is_one_sentence(values, text):
    with pytest.raises(ValueError, match=text):
        SpeculativeConfig(num_speculative_tokens=2, **values)
