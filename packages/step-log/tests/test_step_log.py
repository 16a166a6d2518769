"""The log's format: what goes in comes out, and anything else is an error of one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_core_scheduler import SchedulerConfig
from llmstack_step_log import FileSink, LogHeader, RecordedRun, RingSink, StepLog, StepLogError
from llmstack_step_log.control_plane import CacheConfig
from llmstack_step_log.decisions import pack_scheduled
from llmstack_step_log.encoding import MAGIC
from llmstack_step_log.primitives import Cursor, pack_ints, put_int, put_ints, put_uint, unpack_ints
from llmstack_step_log.records import (
    Checkpoint,
    Event,
    Gap,
    PrefixCacheReset,
    PrefixImported,
    RequestAdded,
    RequestForked,
    RequestsAborted,
    StepScheduled,
    StepUpdated,
)
from llmstack_step_log.replay import verify
from llmstack_step_log.request_fields import pack_request, unpack_request
from llmstack_step_log.step_log import MAX_SEGMENT_BYTES, STEPS_PER_CHECKPOINT
from llmstack_types import (
    EncoderWork,
    EngineCoreRequest,
    MediaItem,
    MediaMemory,
    PrefixMedia,
    RepetitionDetectionParams,
    SamplingParams,
    SchedulerOutput,
    StructuredOutputsParams,
)
from llmstack_types.media import NO_MEDIA

HEADER = LogHeader.of(SchedulerConfig(max_num_seqs=3), CacheConfig(7, 8), {"llmstack-engine-core": "0.1.0"})

ITEMS = (
    MediaItem(bytes(32), "image", 1, 4, ((0, 1), (2, 2)), (1, 2, 2), 9),
    MediaItem(b"1" * 32, "audio", 7, 2),
)
PREFIX_MEDIA = [NO_MEDIA, PrefixMedia("\ud800 salt", ITEMS), PrefixMedia("", ITEMS[1:])]
token_ids = st.integers(0, 2**31 - 1)
texts = st.text(max_size=12)
times = st.integers(0, 2**50)
requests = st.builds(
    EngineCoreRequest,
    texts,
    st.lists(token_ids, min_size=1, max_size=20),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop_token_ids=st.none() | st.lists(token_ids, max_size=3),
        max_tokens=st.none() | st.integers(0, 10**6),
        min_tokens=st.integers(0, 100),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
        repetition_detection=st.none() | st.builds(RepetitionDetectionParams, *[st.integers(0, 256)] * 3),
        structured_outputs=st.none()
        | st.builds(
            StructuredOutputsParams,
            json=st.none() | texts,
            choice=st.none() | st.lists(texts, max_size=3).map(tuple),
            disable_any_whitespace=st.booleans(),
        ),
    ),
    st.lists(token_ids, max_size=3).map(tuple),
    st.floats(0, 1e9),
    st.integers(-(2**63), 2**63 - 1),
    texts,
    st.none() | texts,
    fork_of=texts,
)
events = st.one_of(
    st.builds(RequestAdded, requests),
    st.builds(RequestForked, texts, requests),
    st.builds(RequestsAborted, st.lists(texts, min_size=1, max_size=3)),
    st.builds(StepScheduled, times),
    st.builds(
        StepUpdated,
        times,
        st.integers(0, 3),
        st.lists(st.lists(token_ids, max_size=3), max_size=6) | st.lists(st.tuples(token_ids).map(list), max_size=6),
        st.dictionaries(texts, texts, max_size=2),
    ),
    st.just(PrefixCacheReset()),
    st.builds(PrefixImported, st.lists(st.integers(0, 2**31 - 1)), st.text(max_size=8), st.sampled_from(PREFIX_MEDIA)),
)


def write(log: StepLog, event: Event) -> None:
    match event:
        case RequestAdded(request):
            log.add_request(request)
        case RequestForked(parent_id, request):
            log.fork_request(parent_id, request)
        case RequestsAborted(request_ids):
            log.abort_requests(request_ids)
        case StepScheduled(now_us):
            log.schedule(now_us)
        case StepUpdated(now_us, lag, sampled, errors):
            log.update(now_us, lag, sampled, errors)
        case PrefixCacheReset():
            log.reset_prefix_cache()
        case PrefixImported(token_ids, salt, media):
            log.import_prefix(token_ids, salt, media)


def recorded(data: bytes) -> list[Event]:
    return [event for event in RecordedRun(data).events() if not isinstance(event, Checkpoint)]


def small_log(num_steps: int = 200, sink: RingSink | None = None) -> bytes:
    sink = sink or RingSink(1 << 20)
    log = StepLog(HEADER, sink)
    log.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(seed=1)))
    for step in range(num_steps):
        log.schedule(1000 * step)
        log.decisions.add(bytes([step % 256]))
        log.update(1000 * step + 10, 0, [[step]], {})
    log.close()
    return sink.dump()


def read(data: bytes) -> RecordedRun | None:
    """None for a log that cannot be read; the reason is one line."""
    error: StepLogError | None = None
    try:
        return RecordedRun(data)
    except StepLogError as caught:
        error = caught
    assert "\n" not in str(error)
    return None


def fault(data: bytes) -> str:
    with pytest.raises(StepLogError) as caught:
        list(RecordedRun(data).events())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(st.lists(st.integers(0, 2**63 - 1)), st.lists(st.integers(-(2**62), 2**62)))
def test_numbers_are_decoded_as_they_were_encoded(unsigned: list[int], signed: list[int]) -> None:
    buffer = bytearray()
    for value in unsigned:
        put_uint(buffer, value)
    for value in signed:
        put_int(buffer, value)
    put_ints(buffer, signed)
    cursor = Cursor(bytes(buffer))
    assert [cursor.take_uint() for _ in unsigned] == unsigned
    assert [cursor.take_int() for _ in signed] == signed
    assert cursor.take_ints() == signed
    assert cursor.is_at_end


@pytest.mark.parametrize(("largest", "width"), [(65_535, 2), (65_536, 4), (2**32 - 1, 4), (2**32, 8), (-1, 8)])
def test_a_token_takes_as_many_bytes_as_the_largest_one_needs(largest: int, width: int) -> None:
    typecode, packed = pack_ints([0, largest])
    assert len(packed) == 2 * width
    assert unpack_ints(typecode, packed) == [0, largest]


@given(requests)
def test_a_request_is_decoded_as_far_as_decisions_depend_on_it(request: EngineCoreRequest) -> None:
    params = request.sampling_params
    expected = replace(request, sampling_params=replace(params, stop_token_ids=params.stop_token_ids))
    assert unpack_request(pack_request(request)) == expected


def test_what_only_the_front_end_reads_is_not_recorded() -> None:
    secret = "the user's words"
    packed = pack_request(EngineCoreRequest("a", [1], SamplingParams(stop=secret, seed=0)))
    assert secret.encode() not in packed
    assert unpack_request(packed).sampling_params == SamplingParams(seed=0)


@settings(max_examples=50)
@given(st.lists(events, max_size=30))
def test_events_are_read_in_order(written: list[Event]) -> None:
    sink = RingSink(1 << 20)
    log = StepLog(HEADER, sink)
    for event in written:
        write(log, event)
    log.close()
    run = RecordedRun(sink.dump())
    assert recorded(sink.dump()) == written
    assert run.is_closed
    assert run.header == HEADER
    assert run.header.configs() == (SchedulerConfig(max_num_seqs=3), CacheConfig(7, 8))


def test_a_token_of_a_full_step_takes_a_few_bytes() -> None:
    sink = RingSink(1 << 20)
    log = StepLog(HEADER, sink)
    empty = len(sink.dump())
    for step in range(1000):
        log.schedule(20_000 * step)
        log.update(20_000 * step + 19_000, 0, [[50_000 + row] for row in range(64)], {})
    log.close()
    assert (len(sink.dump()) - empty) / 64_000 < 2.5


@given(st.binary(max_size=300).filter(lambda data: not data.startswith(MAGIC)))
def test_a_foreign_file_is_refused(data: bytes) -> None:
    assert fault(data) == "is no log of steps"


@given(st.integers(0, 10_000))
def test_a_log_that_breaks_off_is_whole_up_to_its_last_checkpoint(length: int) -> None:
    data = small_log()
    cut = data[: length % len(data)]
    run = read(cut)
    if run is None:
        return
    assert not run.is_closed
    assert run.truncated_at is None or run.truncated_at < len(cut)
    assert recorded(cut) == recorded(data)[: len(recorded(cut))]


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_found(position: int, change: int) -> None:
    data = bytearray(small_log())
    position %= len(data)
    data[position] ^= change
    run = read(bytes(data))
    if run is not None:
        assert run.truncated_at is not None  # a length that now reaches beyond the end


def test_a_later_version_and_a_broken_header_are_named() -> None:
    data = small_log()
    assert "format version 9" in fault(data[:8] + b"\x09" + data[9:])
    assert "header" in fault(data[:9])
    assert "header" in fault(data[:20])


def test_a_setting_that_these_packages_do_not_know_is_named() -> None:
    header = LogHeader({**HEADER.scheduler, "new_setting": 1}, HEADER.cache)
    with pytest.raises(StepLogError, match="new_setting"):
        header.configs()


@pytest.mark.parametrize("numerics", [{}, {"numeric_contract": "ab", "backends": {"linear": "native"}}])
def test_a_header_says_how_numbers_were_computed(numerics: dict[str, Any]) -> None:
    header = LogHeader(HEADER.scheduler, HEADER.cache, {}, b"", numerics)
    assert LogHeader.unpack(header.pack()) == header


def test_the_ring_keeps_its_size_and_says_what_it_dropped() -> None:
    sink = RingSink(4096)
    data = small_log(5000, sink)
    assert 2048 < sink.num_bytes <= 4096
    assert 0 < sink.num_dropped_steps < 5000
    first, *rest = recorded(data)
    assert first == Gap(sink.num_dropped_steps)
    assert sum(isinstance(event, StepScheduled) for event in rest) == 5000 - sink.num_dropped_steps


def test_a_ring_without_room_for_one_segment_holds_none() -> None:
    sink = RingSink(1)
    small_log(3, sink)
    assert sink.num_bytes == 0


def test_large_requests_do_not_pile_up_in_an_open_segment() -> None:
    sink = RingSink(1 << 24)
    log = StepLog(HEADER, sink)
    for index in range(20):
        log.add_request(EngineCoreRequest(str(index), list(range(70_000, 80_000)), SamplingParams()))
    assert sink.num_bytes > 20 * 40_000 - 2 * MAX_SEGMENT_BYTES


def test_a_file_is_for_its_owner_alone_and_complete_at_every_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    log = StepLog(HEADER, FileSink(str(path)))
    for step in range(STEPS_PER_CHECKPOINT + 1):
        log.schedule(step)
    assert path.stat().st_mode & 0o077 == 0
    run = RecordedRun(path.read_bytes())
    assert (run.last.num_steps, run.is_closed, run.truncated_at) == (STEPS_PER_CHECKPOINT, False, None)
    log.close()
    log.close()
    assert RecordedRun(path.read_bytes()).is_closed


def test_the_log_of_an_engine_core_that_crashed_is_kept_beside_that_of_the_next_one(tmp_path: Path) -> None:
    path, target, folder = tmp_path / "run.steps", tmp_path / "disk" / "real.steps", tmp_path / "disk"
    folder.mkdir()
    path.symlink_to(target)
    for num_steps in (10, 20, 30):
        log = StepLog(HEADER, FileSink(str(path)))
        for step in range(num_steps):
            log.schedule(step)
        log.close()
    assert sorted(one.name for one in folder.iterdir()) == ["real.steps", "real.steps.before"]
    kept = [RecordedRun(one.read_bytes()).last.num_steps for one in (path, folder / "real.steps.before")]
    assert (kept, path.is_symlink()) == ([30, 20], True)


def test_an_earlier_log_that_cannot_be_renamed_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    path.write_bytes(b"earlier")
    (tmp_path / "run.steps.before").mkdir()
    FileSink(str(path)).close()
    assert path.read_bytes() == b""


def test_a_full_disk_ends_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(HEADER, FileSink("/dev/full"))
    for step in range(1000):
        log.schedule(step)
    log.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_of_an_item_the_log_has_all_but_where_its_encoder_reads_it():
    memory = MediaMemory(7, data=b"private")
    item = MediaItem(bytes(32), "image", 1, 4, ((0, 1), (2, 2)), (1, 2, 2), 9, memory)
    request = EngineCoreRequest("a", [0] * 9, SamplingParams(seed=1), media=(item, replace(item, offset=5)))
    packed = pack_request(request)
    assert b"private" not in packed
    without = replace(item, memory=None)
    assert unpack_request(packed) == replace(request, media=(without, replace(without, offset=5)))


def test_the_work_of_an_encoder_is_a_decision_whatever_its_item_is_read_from():
    item = MediaItem(bytes(32), "image", 1, 4, num_units=9, memory=MediaMemory(7, data=b"private"))
    step = SchedulerOutput(1, encoder_work=[EncoderWork(3, 0, 2, item), EncoderWork(4, 2, 1)], freed_media=[2])
    without = replace(step, encoder_work=[EncoderWork(3, 0, 2, replace(item, memory=None)), EncoderWork(4, 2, 1)])
    assert pack_scheduled(step) == pack_scheduled(without)
    other = replace(item, digest=bytes([1]) * 32)
    assert pack_scheduled(step) != pack_scheduled(replace(step, encoder_work=[EncoderWork(3, 0, 2, other)]))


def test_a_log_of_an_older_format_is_refused_in_one_sentence() -> None:
    log = (Path(__file__).parent / "data" / "step_log_0_1_0.bin").read_bytes()
    with pytest.raises(StepLogError) as caught:
        RecordedRun(log)
    assert str(caught.value) == "has format version 1, and these packages read version 6"


def test_a_log_of_this_format_is_derived_bit_for_bit() -> None:
    """Its run has preemptions, prefix hits, aborts, a failed row, beams and a reset of the prefix cache."""
    log = (Path(__file__).parent / "data" / "step_log_format_6.bin").read_bytes()
    report = verify(RecordedRun(log))
    assert (report.num_steps, report.num_requests, report.num_tokens) == (48, 18, 134)
    assert report.digest == "091306ea970e5ec4d55c2b7f45cde9b4"
