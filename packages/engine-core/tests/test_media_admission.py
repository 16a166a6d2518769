"""What a prompt has besides tokens is checked before the scheduler sees it."""

from dataclasses import replace

import pytest

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.admission import check_request
from llmstack_engine_core.build import with_media
from llmstack_types import (
    EngineCoreRequest,
    EngineReady,
    EngineStartError,
    InvalidRequestError,
    KVTransferParams,
    MediaItem,
    MediaMemory,
    MediaSpec,
    ModelRunnerConfig,
    SamplingParams,
)

SPEC = MediaSpec(8, {"image": 3, "embeds": 0}, max_num_tokens={"image": 6, "embeds": 4})
READY = EngineReady(16, 4, 64, 97, "float32", "cpu", media=SPEC, encoder_cache_tokens=64)
IMAGE = MediaItem(bytes(32), "image", 1, 4, num_units=16, layout=(1, 4, 4), memory=MediaMemory(3, data=b"abc"))
EMBEDS = MediaItem(b"e" * 32, "embeds", 6, 2, memory=MediaMemory(64, path="/proc/1/fd/3"))


def request(*media, **changes):
    return EngineCoreRequest("one", [7, 9, 9, 9, 9, 8, 0, 0, 5], SamplingParams(max_tokens=4), media=media, **changes)


def problem(*media, ready=READY, **changes):
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request(*media, **changes), ready)
    return caught.value


def test_items_in_order_are_taken():
    check_request(request(IMAGE, EMBEDS), READY)
    check_request(request(replace(IMAGE, embed_runs=((0, 2), (2, 2)))), READY)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "audio"}, "is of the kind audio, which the model does not take"),
        ({"digest": b"short"}, "has a digest of 5 bytes, not of 32"),
        ({"num_units": 0}, "has 0 units for 3 layers"),
        ({"num_tokens": 0}, "has the places 1 to 0"),
        ({"offset": -1}, "has the places -1 to 2"),
        ({"offset": 6}, "has the places 6 to 9, but 0 to 8 are free"),
        ({"embed_runs": ((0, 0),)}, "has runs of vectors that overlap"),
        ({"embed_runs": ((2, 2), (0, 1))}, "has runs of vectors that overlap"),
        ({"embed_runs": ((3, 2),)}, "has runs of vectors that overlap"),
        ({"memory": None}, "has no memory"),
        ({"memory": MediaMemory(3)}, "has no memory"),
        ({"memory": MediaMemory(3, "/a", b"abc")}, "has no memory"),
        ({"memory": MediaMemory(4, data=b"abc")}, "has 3 bytes in place of 4"),
        ({"offset": 2}, "has vectors in place of different token ids"),
    ],
)
def test_an_item_that_cannot_be_is_named(changes, text):
    error = problem(replace(IMAGE, **changes))
    assert error.param == "media[0]"
    assert f"media[0] {text}" in error.message


def test_items_that_overlap_are_refused_by_the_name_of_the_second():
    assert problem(IMAGE, replace(EMBEDS, offset=4)).param == "media[1]"
    assert problem(EMBEDS, IMAGE).param == "media[1]"


def test_vectors_with_units_are_refused():
    assert "1 units for 0 layers" in problem(replace(EMBEDS, num_units=1)).message


def test_vectors_of_another_width_or_type_are_refused():
    for ready in (replace(READY, dtype="bfloat16"), replace(READY, media=replace(SPEC, vector_size=9))):
        assert "64 bytes, which are not 2 vectors" in problem(EMBEDS, ready=ready).message


def test_a_model_of_tokens_takes_no_item():
    assert "does not take" in problem(IMAGE, ready=replace(READY, media=None)).message


def test_blocks_of_a_prompt_with_media_are_not_exchanged():
    assert problem(IMAGE, kv_transfer=KVTransferParams(do_remote_decode=True)).param == "kv_transfer_params"


def test_a_step_without_room_for_an_item_that_must_not_be_cut_ends_the_start_with_the_number_to_set():
    config, atomic = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), replace(SPEC, is_atomic=True)
    assert with_media(config, SPEC).media == SPEC
    with pytest.raises(EngineStartError, match=r"max_num_batched_tokens \(8\) must be at least 9"):
        with_media(config, atomic)
    fitting = with_media(replace(config, max_num_batched_tokens=9), atomic)
    assert fitting.min_stage_tokens == 6
    assert fitting.num_encoder_tokens == 9


def test_the_configuration_with_media_is_plain_data():
    model = ModelRunnerConfig("echo")
    config = EngineConfig(model, scheduler=SchedulerConfig(media=SPEC))
    assert EngineConfig.from_plain(config.to_plain()) == config
    with pytest.raises(ValueError, match="encoder_cache_tokens"):
        EngineConfig(model, scheduler=SchedulerConfig(encoder_cache_tokens=5))
