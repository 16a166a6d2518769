"""Messages between ranks arrive as they were sent, and what is no message of this start is refused."""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest

from llmstack_engine_core.messages.kinds import CodecError
from llmstack_parallel.messages import (
    MESSAGES,
    VERSION,
    AdapterCall,
    AdapterMessage,
    Answer,
    Call,
    CallMessage,
    Failure,
    MasksMessage,
    Message,
    StepMessage,
    WeightsMessage,
)
from llmstack_types import (
    NewRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)

STEP = SchedulerOutput(
    step=7,
    new_requests=[
        NewRequest(
            "a", [1, 2, 3], 2, SamplingParams(temperature=0.5, seed=3, stop_token_ids=[9], logit_bias={4: -1.0})
        ),
        NewRequest(
            "b",
            [5],
            1,
            SamplingParams(),
            (2,),
            None,
            PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED, use_activation=True),
        ),
    ],
    scheduled_requests=[
        ScheduledRequest("a", 0, 3, [4, 5], ()),
        ScheduledRequest("b", 70_000, 2, [], [8]),
    ],
    removed_request_ids=["c"],
    total_num_scheduled_tokens=5,
    swap_outs=[(1, 2)],
    swap_ins=[(3, 4), (5, 6)],
    block_copies=[(7, 8)],
)


@pytest.mark.parametrize(
    "message",
    [
        CallMessage(Call.INITIALIZE_KV_CACHE, (96, 3)),
        AdapterMessage(AdapterCall.READ, "style@d.1", "/adapters/style"),
        MasksMessage(4, TokenMasks(["a"], bytearray(b"\xff\x01\x02\x03"))),
        Answer((1, 2**40)),
        Answer(digest="0f" * 16),
        WeightsMessage("/weights/step-17"),
        WeightsMessage(),
        Failure("there is no model"),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message, 5), 5)[1] == message


def test_a_step_arrives_with_all_its_fields() -> None:
    _, message = MESSAGES.decode(MESSAGES.encode(StepMessage(3, STEP, True, [[[1], [], [2, 3]], []]), 5), 5)
    assert isinstance(message, StepMessage)
    assert (message.number, message.has_masks, message.sampled) == (3, True, [[[1], [], [2, 3]], []])
    arrived, sent = message.scheduled, STEP
    assert [row._replace(draft_token_ids=list(row.draft_token_ids)) for row in sent.scheduled_requests] == (
        arrived.scheduled_requests
    )
    for name in ("step", "removed_request_ids", "total_num_scheduled_tokens", "swap_outs", "swap_ins", "block_copies"):
        assert getattr(arrived, name) == getattr(sent, name)
    for mine, theirs in zip(arrived.new_requests, sent.new_requests, strict=True):
        assert (mine.request_id, mine.token_ids, mine.eos_token_ids) == (
            theirs.request_id, theirs.token_ids, theirs.eos_token_ids,
        )  # fmt: skip
        assert mine.sampling_params.seed == theirs.sampling_params.seed
        assert mine.sampling_params.logit_bias == theirs.sampling_params.logit_bias
        assert mine.pooling_params == theirs.pooling_params


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (MESSAGES.encode(Answer(), 6), "another epoch"),
        (b"\xc1", "not a message"),
        (msgpack.packb([1, 16, 5, []]), "version"),
        (msgpack.packb([VERSION, 99, 5]), "unknown tag"),
        (msgpack.packb([VERSION, 16, 5]), "list of 2 items"),
        (msgpack.packb([VERSION, 16, 5, ["x"], ""]), "integers"),
        (msgpack.packb([VERSION, 1, 5, 77, []]), "call must be one of"),
        (msgpack.packb([VERSION, 2, 5, 0, [1], False, []]), "scheduled must be a list of 11"),
        (msgpack.packb([VERSION, 3, 5, 0, [["a"], "x"]]), "bits"),
    ],
)
def test_a_frame_that_is_no_message_of_this_start_is_refused(frame: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        MESSAGES.decode(frame, 5)
