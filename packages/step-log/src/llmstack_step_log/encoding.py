"""The format of a step log.

Magic, version and header come first, then segments of records with tag, length and payload. A segment ends with a
checkpoint: flags, number of steps, decision hash, and the CRC-32 of the segment up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final
from zlib import crc32

from llmstack_step_log.decisions import DIGEST_SIZE
from llmstack_step_log.errors import StepLogError
from llmstack_step_log.header import MARKER_SIZE, LogHeader
from llmstack_step_log.packing import pack, unpack
from llmstack_step_log.primitives import Cursor, put_int, put_ints, put_uint
from llmstack_step_log.records import (
    Checkpoint,
    Event,
    Gap,
    Marked,
    NumericsChanged,
    PrefixCacheReset,
    PrefixImported,
    RequestAdded,
    RequestForked,
    RequestsAborted,
    SessionsReleased,
    Snapshotted,
    StepScheduled,
    StepUpdated,
    Tag,
)
from llmstack_step_log.request_fields import pack_media, pack_request, unpack_media, unpack_request
from llmstack_types import EngineCoreRequest, PrefixMedia
from llmstack_types.media import NO_MEDIA

MAGIC: Final = b"llmsteps"
FORMAT_VERSION: Final = 6
"""Since 6 snapshots have the sessions, whatever is evicted first."""

_HAS_COUNTS: Final = 1
_HAS_ERRORS: Final = 2
_IS_CLOSED: Final = 1
_CRC_SIZE: Final = 4


def put_record(segment: bytearray, tag: int, payload: bytes | bytearray) -> None:
    """Appends a record: tag, length, payload."""
    segment.append(tag)
    put_uint(segment, len(payload))
    segment += payload


def encode_header(header: LogHeader) -> bytearray:
    """The beginning of a log; its first segment."""
    segment = bytearray(MAGIC)
    segment.append(FORMAT_VERSION)
    packed = header.pack()
    put_uint(segment, len(packed))
    segment += packed
    return segment


def put_checkpoint(segment: bytearray, checkpoint: Checkpoint) -> None:
    """Ends a segment with its checkpoint."""
    payload = bytearray([_IS_CLOSED if checkpoint.is_closed else 0])
    put_uint(payload, checkpoint.num_steps)
    payload += checkpoint.digest
    payload += crc32(payload, crc32(segment)).to_bytes(_CRC_SIZE, "little")
    put_record(segment, Tag.CHECKPOINT, payload)


def read_checkpoint(payload: bytes, segment: bytes | None = None) -> Checkpoint:
    """A checkpoint; with the records of the segment that it ends, these are checked.

    Raises:
        StepLogError: The segment is not the one that was written.
    """
    cursor = Cursor(payload)
    is_closed = bool(cursor.take(1)[0] & _IS_CLOSED)
    checkpoint = Checkpoint(cursor.take_uint(), cursor.take(DIGEST_SIZE), is_closed)
    checked = payload[: cursor.position]
    expected = int.from_bytes(cursor.take(_CRC_SIZE), "little")
    if segment is not None and (not cursor.is_at_end or crc32(checked, crc32(segment)) != expected):
        raise StepLogError("a checksum does not agree")
    return checkpoint


def encode_forked(parent_id: str, request: EngineCoreRequest) -> bytearray:
    """Payload of a fork: the parent's id, then the request."""
    return _texted(parent_id.encode()) + pack_request(request)


def encode_imported(token_ids: list[int], salt: str, media: PrefixMedia = NO_MEDIA) -> bytearray:
    """Payload of an import: the salt, then the tokens, then the items where there are any."""
    payload = _texted(salt.encode("utf-8", "surrogatepass"))
    put_ints(payload, token_ids)
    return payload + pack_media(media) if media.items else payload


def _texted(text: bytes) -> bytearray:
    """A payload that begins with a text."""
    payload = bytearray()
    put_uint(payload, len(text))
    return payload + text


def encode_mark(marker: bytes, num_steps: int) -> bytearray:
    """Payload of a mark."""
    payload = bytearray(marker)
    put_uint(payload, num_steps)
    return payload


def encode_scheduled(now_us: int, last_us: int) -> bytearray:
    """Payload of a call for a step; times are differences to the one before."""
    payload = bytearray()
    put_int(payload, now_us - last_us)
    return payload


def encode_updated(
    now_us: int, last_us: int, lag: int, sampled_token_ids: list[list[int]], errors: Mapping[str, str]
) -> bytearray:
    """Payload of a step's results; one token per row, the usual case, is said in one bit."""
    payload = bytearray()
    put_int(payload, now_us - last_us)
    put_uint(payload, lag)
    token_ids = list(chain.from_iterable(sampled_token_ids))
    # Every row has one token exactly where the sum says so and no row has none.
    has_counts = len(token_ids) != len(sampled_token_ids) or not all(sampled_token_ids)
    payload.append((_HAS_COUNTS if has_counts else 0) | (_HAS_ERRORS if errors else 0))
    put_ints(payload, token_ids)
    if has_counts:
        put_ints(payload, list(map(len, sampled_token_ids)))
    if errors:
        payload += pack(dict(errors))
    return payload


class EventDecoder:
    """Payloads to events, in the order of the log: times are differences."""

    def __init__(self, last_us: int = 0) -> None:
        """`last_us`: The time of the last event before the first one to decode."""
        self._last_us = last_us
        self._decoders: Mapping[int, Callable[[bytes], Event]] = MappingProxyType(
            {
                Tag.ADD: lambda payload: RequestAdded(unpack_request(payload)),
                Tag.FORK: _forked,
                Tag.ABORT: lambda payload: RequestsAborted(list(map(str, unpack(payload, list)))),
                Tag.SCHEDULE: self._scheduled,
                Tag.UPDATE: self._updated,
                Tag.RESET_PREFIX_CACHE: lambda payload: PrefixCacheReset(),
                Tag.RELEASE: lambda payload: SessionsReleased(*map(str, unpack(payload, list))),
                Tag.IMPORT: _imported,
                Tag.IMPORT_WITH_MEDIA: _imported,
                Tag.NUMERICS: lambda payload: NumericsChanged(unpack(payload, dict)),
                Tag.CHECKPOINT: read_checkpoint,
                Tag.MARK: lambda payload: Marked(Cursor(payload, MARKER_SIZE).take_uint()),
                Tag.SNAPSHOT: lambda payload: Snapshotted(),
                Tag.GAP: lambda payload: Gap(Cursor(payload).take_uint()),
            }
        )

    def decode(self, tag: int, payload: bytes) -> Event:
        """The event of one record.

        Raises:
            StepLogError: It is none.
        """
        decoder = self._decoders.get(tag)
        if decoder is None:
            raise StepLogError(f"a record has the unknown tag {tag}")
        return decoder(payload)

    def _take_time(self, cursor: Cursor) -> int:
        self._last_us += cursor.take_int()
        return self._last_us

    def _scheduled(self, payload: bytes) -> Event:
        return StepScheduled(self._take_time(Cursor(payload)))

    def _updated(self, payload: bytes) -> Event:
        cursor = Cursor(payload)
        now_us, lag = self._take_time(cursor), cursor.take_uint()
        flags = cursor.take(1)[0]
        flat = cursor.take_ints()
        rows = _split(flat, cursor.take_ints()) if flags & _HAS_COUNTS else [[token_id] for token_id in flat]
        errors = unpack(payload[cursor.position :], dict) if flags & _HAS_ERRORS else {}
        return StepUpdated(now_us, lag, rows, errors)


def _forked(payload: bytes) -> RequestForked:
    cursor = Cursor(payload)
    parent_id = str(cursor.take(cursor.take_uint()), "utf-8", "replace")
    return RequestForked(parent_id, unpack_request(payload[cursor.position :]))


def _imported(payload: bytes) -> PrefixImported:
    cursor = Cursor(payload)
    salt = str(cursor.take(cursor.take_uint()), "utf-8", "surrogatepass")
    token_ids = cursor.take_ints()
    media = NO_MEDIA if cursor.is_at_end else unpack_media(payload[cursor.position :])
    return PrefixImported(token_ids, salt, media)


def _split(flat: list[int], counts: list[int]) -> list[list[int]]:
    if sum(counts) != len(flat) or min(counts, default=0) < 0:
        raise StepLogError("a step's rows and tokens do not agree")
    rows, start = [], 0
    for num_tokens in counts:
        rows.append(flat[start : start + num_tokens])
        start += num_tokens
    return rows
