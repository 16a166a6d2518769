"""Declaration of what a prompt has besides tokens, and of the work on it."""

from __future__ import annotations

from typing import Final

from llmstack_engine_core.messages import kinds
from llmstack_engine_core.messages.kinds import COUNT, UINT32S, columns, items, optional
from llmstack_engine_core.messages.rows import mapping, row, tuple_of
from llmstack_types import EncoderStats, EncoderWork, MediaItem, MediaMemory, MediaSpec
from llmstack_types.media import DIGEST_BYTES
from llmstack_types.vocabulary import MediaKind, words_of

MAX_PATH_LENGTH: Final = 4096
_KIND: Final = kinds.word(words_of(MediaKind))
_MEMORY: Final = row(MediaMemory, {"path": kinds.text(MAX_PATH_LENGTH), "data": kinds.blob()}, prefix="memory.")
_ITEM: Final = row(
    MediaItem,
    {
        "digest": kinds.blob(DIGEST_BYTES, 1),
        "kind": _KIND,
        "embed_runs": columns(tuple, {"start": UINT32S, "length": UINT32S}, tuple),
        "layout": kinds.uint32s(make=tuple),
        "memory": optional(_MEMORY),
    },
    prefix="media.",
)  # fmt: skip
MEDIA: Final = items(_ITEM, make=tuple)
NUMBERED_MEDIA: Final = items(tuple_of(COUNT, _ITEM), make=tuple)
ENCODER_WORK: Final = items(row(EncoderWork, {"item": optional(_ITEM)}, prefix="encoder_work."))
_COUNTS: Final = mapping(items(tuple_of(_KIND, COUNT)))
MEDIA_SPEC: Final = row(MediaSpec, {"num_layers": _COUNTS, "max_num_tokens": _COUNTS}, prefix="media.")
ENCODER_STATS: Final = row(EncoderStats)
