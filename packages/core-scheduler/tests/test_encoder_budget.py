"""Layers over many units are computed in slices, and the budget of a step is what its model says."""

from hashlib import sha256

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeEncoder, FakeKVCacheManager, FakeModelRunner
from llmstack_types import EngineCoreRequest, MediaItem, MediaSpec, SamplingParams

NUM_LAYERS, SLICE_UNITS, STEP_UNITS = 4, 4, 3
SPEC = MediaSpec(8, {"image": NUM_LAYERS}, max_num_tokens={"image": 8}, slice_units=SLICE_UNITS, step_units=STEP_UNITS)
PICTURE = MediaItem(sha256(b"cat").digest(), "image", 3, 4, num_units=10)


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (0, [3, 3, 3, 3]),  # 3 of 10 units pass 4 layers of 3 slices: 3.6 slices
        (1, [1] * 12),
        (10, [12]),
    ],
)
def test_a_stream_waits_for_as_many_slices_as_the_budget_pays(asked: int, parts: list[int]) -> None:
    assert SPEC.num_layers_of(PICTURE) == 12
    config = SchedulerConfig(
        max_num_seqs=4, max_model_len=96, max_num_batched_tokens=32, media=SPEC, encoder_budget_units=asked
    )
    scheduler, encoder = Scheduler(config, FakeKVCacheManager(64, 4)), FakeEncoder(SPEC)
    runner = FakeModelRunner(64, 4, encoder=encoder)
    found = []

    def step() -> None:
        scheduled = scheduler.schedule(0.0)
        found.extend(part.num_layers for part in scheduled.encoder_work)
        scheduler.update_from_output(scheduled, runner.execute_model(scheduled), 0.0)

    scheduler.add_request(EngineCoreRequest("stream", [1, 2, 3], SamplingParams(max_tokens=40)))
    step()
    prompt = [1, 2, 3, 7, 7, 7, 7, 4]
    scheduler.add_request(EngineCoreRequest("picture", prompt, SamplingParams(max_tokens=2), media=(PICTURE,)))
    while len(found) < len(parts):
        step()
    assert found == parts
    step()
    assert found == parts  # it is complete
