"""Declaration of `SchedulerOutput`, for processes that share a step."""

from __future__ import annotations

from typing import Final

from llmstack_engine_core.messages.kinds import COUNT, UINT32S, columns, items, lists, optional, texts
from llmstack_engine_core.messages.media import ENCODER_WORK, NUMBERED_MEDIA
from llmstack_engine_core.messages.outputs import REQUEST_IDS
from llmstack_engine_core.messages.requests import (
    LORA_NAME,
    MAX_REQUEST_ID_LENGTH,
    POOLING_PARAMS,
    REQUEST_ID,
    SAMPLING_PARAMS,
    TOKEN_IDS,
)
from llmstack_engine_core.messages.rows import row
from llmstack_types import NewRequest, ScheduledRequest, SchedulerOutput

_COPIES: Final = columns(tuple, {"source": UINT32S, "destination": UINT32S})
_NEW_REQUEST: Final = row(
    NewRequest,
    {
        "request_id": REQUEST_ID,
        "token_ids": UINT32S,
        "sampling_params": SAMPLING_PARAMS,
        "eos_token_ids": TOKEN_IDS,
        "lora_name": LORA_NAME,
        "pooling_params": optional(POOLING_PARAMS),
        "media": NUMBERED_MEDIA,
    },
)
ROWS: Final = columns(
    ScheduledRequest,
    {
        "request_id": REQUEST_IDS,
        "num_computed_tokens": UINT32S,
        "num_scheduled_tokens": UINT32S,
        "new_block_ids": lists(UINT32S),
        "draft_token_ids": lists(UINT32S),
    },
)
STEP: Final = row(
    SchedulerOutput,
    {
        "step": COUNT,
        "new_requests": items(_NEW_REQUEST),
        "scheduled_requests": ROWS,
        "removed_request_ids": texts(MAX_REQUEST_ID_LENGTH, low=1),
        "swap_outs": _COPIES,
        "swap_ins": _COPIES,
        "block_copies": _COPIES,
        "states": columns(tuple, {"read": UINT32S, "written": UINT32S}),
        "encoder_work": ENCODER_WORK,
        "freed_media": UINT32S,
    },
)
