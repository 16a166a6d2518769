"""Published cache events: their shape, who gets them, and what a subscriber can make of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
import pytest
import zmq
from engine_core_helpers.ports import free_address
from zmq.utils.monitor import parse_monitor_message

from llmstack_core_scheduler.media_numbers import MediaNumbers, media_keys, routing_keys
from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_core import EngineConfig, EngineCore, build_engine_core
from llmstack_engine_core.cache_news import CacheNews
from llmstack_engine_core.ipc.keys import make_key_file, read_keys
from llmstack_engine_core.kv_events import EventEncoder, KVEventsConfig
from llmstack_engine_core.zmq_publisher import END_OF_REPLAY, ZmqPublisher, _Sender
from llmstack_kv_cache import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    CompanionRemoved,
    CompanionStored,
    KVCacheManager,
)
from llmstack_kv_cache.segments import segment_keys, unpack_keys
from llmstack_types import (
    EngineCoreRequest,
    EngineStartError,
    MediaItem,
    ModelRunnerConfig,
    PrefixMedia,
    SamplingParams,
)

TIMEOUT_MS = 30_000
HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED


Connect = Callable[..., zmq.Socket[bytes]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []
    monitors: list[zmq.Socket[bytes]] = []

    def make(kind: int, endpoint: str, keys: tuple[bytes, bytes, bytes] | None = None) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        sockets.append(made)
        made.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        if keys is not None:
            for name, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True):
                made.setsockopt(name, key)
            monitors.append(made.get_monitor_socket(HANDSHAKES))
        made.connect(endpoint)
        return made

    make.monitors = monitors  # type: ignore[attr-defined]
    yield make
    for made in [*monitors, *sockets]:
        made.close(linger=0)
    context.term()


def config_in(folder: Path, **fields: Any) -> KVEventsConfig:
    replay = f"ipc://{folder}/replay"
    return KVEventsConfig(True, endpoint=f"ipc://{folder}/events", replay_endpoint=replay, **fields)


def replay(replays: zmq.Socket[bytes], start: int = 0) -> list[tuple[int, Any]]:
    """The kept batches from a number on, each with its number."""
    replays.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while True:
        _, number, payload = replays.recv_multipart()
        if number == END_OF_REPLAY:
            assert payload == b""
            return batches
        batches.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))


def rebuild(batches: list[tuple[int, Any]]) -> dict[int, tuple[int | None, list[int]]]:
    """Block to its parent and its tokens, as a router of others would keep them."""
    known: dict[int, tuple[int | None, list[int]]] = {}
    for _, (_, events, _) in batches:
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                known.clear()
            elif kind == "BlockRemoved":
                for block in fields[0]:
                    del known[block]
            else:
                blocks, parent, token_ids, block_size, _, medium, _ = fields
                assert medium == "GPU"
                for i, block in enumerate(blocks):
                    known[block] = (parent, token_ids[i * block_size : (i + 1) * block_size])
                    parent = block
    return known


def contents(known: dict[int, tuple[int | None, list[int]]]) -> set[tuple[int, ...]]:
    """The prefixes that the blocks make, as tokens."""

    def prefix(block: int | None) -> tuple[int, ...]:
        return () if block is None else (*prefix(known[block][0]), *known[block][1])

    return {prefix(block) for block in known}


def run_requests(core: EngineCore) -> None:
    for number in range(12):
        prompt = [number % 4 + 1] * 60 + list(range(1, 40))
        core.add_request(EngineCoreRequest(str(number), prompt, SamplingParams(max_tokens=3, seed=0)))
        while core.has_unfinished_requests():
            core.step()


def test_what_a_subscriber_rebuilds_is_what_the_engine_core_has_cached(tmp_path: Path, connect: Connect) -> None:
    events = config_in(tmp_path, topic="kv", data_parallel_rank=0)
    core = build_engine_core(
        EngineConfig(ModelRunnerConfig("echo", block_size=16), runner="echo", num_blocks=20, kv_events=events)
    )
    try:
        subscriber = connect(zmq.SUB, events.endpoint)
        subscriber.subscribe("kv")
        replays = connect(zmq.DEALER, events.replay_endpoint or "")
        run_requests(core)
        while not subscriber.poll(50):  # what was published before the subscription arrived is lost
            core.reset_prefix_cache()
            run_requests(core)
        run_requests(core)
        batches = replay(replays)
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert batches[0][1][1:] == [[["AllBlocksCleared"]], 0]
        assert core.observers.cache_news is not None
        cached = [event for event in core.observers.cache_news._cache.stored() if event.identities]
        expected = {tuple(event.token_ids) for event in cached if not event.parent_identity}
        found = contents(rebuild(batches))
        assert len(found) == sum(len(event.identities) for event in cached)
        assert expected <= found
        topic, number, _ = subscriber.recv_multipart()
        assert topic == b"kv"
        later = [int.from_bytes(subscriber.recv_multipart()[1], "big") for _ in range(3)]
        assert later == [int.from_bytes(number, "big") + i for i in (1, 2, 3)]
        core.reset_prefix_cache()
        assert rebuild(replay(replays)) == {}
    finally:
        core.shutdown()


def test_events_have_the_arrays_of_vllm_and_no_salt() -> None:
    encoder = EventEncoder(run_number=3, data_parallel_rank=1)
    salt = prefix_salt("secret", "poet@abc.1")
    events = [BlockStored((64, 65), 0, (1, 2, 3, 4), 2, salt), BlockStored((128,), 65, (5, 6), 2)]
    base = 3 << 40
    (batch,) = encoder.batches([*events, BlockRemoved((128,)), AllCleared()], 1.5, is_whole=False)
    assert batch == [
        1.5,
        [
            ["BlockStored", [base + 64, base + 65], None, [1, 2, 3, 4], 2, None, "GPU", "poet@abc.1"],
            ["BlockStored", [base + 128], base + 65, [5, 6], 2, None, "GPU", "poet@abc.1"],
            ["BlockRemoved", [base + 128], "GPU"],
            ["AllBlocksCleared"],
        ],
        1,
    ]
    for salt in ("", "secret", prefix_salt("\x01secret\x01", None)):
        ((_, ((*_, adapter),), _),) = encoder.batches([BlockStored((192,), 0, (1, 2), 2, salt)], 0.0, is_whole=False)
        assert adapter is None


def test_events_name_the_group_where_there_are_several_as_vllm_does() -> None:
    encoder = EventEncoder(run_number=0, data_parallel_rank=0)
    events = [
        BlockStored((64, 65), 0, (1, 2, 3, 4), 2, group=1), CompanionStored((64, 65), 2, 0),
        CompanionRemoved((64,), 0), BlockRemoved((65,), 1),
    ]  # fmt: skip
    (batch,) = encoder.batches(events, 0.0, is_whole=False)
    assert batch[1] == [
        ["BlockStored", [64, 65], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 1],
        ["BlockStored", [64, 65], None, [], 2, None, "GPU", None, None, 0],
        ["BlockRemoved", [64], "GPU", 0],
        ["BlockRemoved", [65], "GPU", 1],
    ]


class Publisher:
    """Keeps what it gets; a batch is lost while it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.sent: list[tuple[bool, int]] = []

    def publish(self, events: Any, *, is_whole: bool) -> bool:
        if not self.is_full:
            self.sent.append((is_whole, len(list(events))))
        return not self.is_full

    def close(self) -> None:
        """There is nothing to close."""


def test_what_a_full_queue_has_lost_is_published_again_as_a_whole() -> None:
    cache, publisher = KVCacheManager(20, 2), Publisher()
    news = CacheNews(cache, publisher)
    for name, is_full in (("a", False), ("b", True), ("c", True), ("d", False), ("e", False)):
        publisher.is_full = is_full
        cache.allocate_slots(name, 4)
        cache.cache_blocks(name, [ord(name)] * 4, 4)
        news.read()
    assert publisher.sent == [(True, 0), (False, 1), (True, 4), (False, 1)]


def test_a_queue_that_is_full_is_noticed_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_send, run = threading.Event(), _Sender.run

    def run_later(sender: _Sender) -> None:
        may_send.wait()
        run(sender)

    monkeypatch.setattr(_Sender, "run", run_later)
    publisher = ZmqPublisher(config_in(tmp_path, max_queue_size=1), None)
    try:
        queued = [publisher.publish([AllCleared()], is_whole=False) for _ in range(8)]
        assert queued[0]
        assert not queued[-1]
    finally:
        may_send.set()
        publisher.close()


def test_a_replay_has_the_last_batches_only_and_bad_requests_are_ignored(tmp_path: Path, connect: Connect) -> None:
    events = config_in(tmp_path, buffer_steps=2)
    publisher = ZmqPublisher(events, None)
    try:
        for _ in range(5):
            assert publisher.publish([AllCleared()], is_whole=False)
        replays = connect(zmq.DEALER, events.replay_endpoint or "")
        replays.send(b"what?")
        replays.send_multipart([b"", b"1"])
        found: list[tuple[int, Any]] = []
        while not found or found[-1][0] < 4:  # the thread may not have sent all of them yet
            found = replay(replays)
        assert [number for number, _ in found] == [3, 4]
        assert [number for number, _ in replay(replays, 4)] == [4]
    finally:
        publisher.close()


@pytest.mark.parametrize("is_known", [True, False])
def test_with_a_key_file_only_who_has_its_keys_is_served(is_known: bool, tmp_path: Path, connect: Connect) -> None:
    make_key_file(tmp_path / "keys")
    keys = read_keys(tmp_path / "keys")
    own = (keys.public, keys.secret) if is_known else zmq.curve_keypair()
    address = free_address()
    events = KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=address)
    publisher = ZmqPublisher(events, str(tmp_path / "keys"))
    try:
        publisher.publish([AllCleared()], is_whole=False)
        replays = connect(zmq.DEALER, address, (keys.public, *own))
        (monitor,) = connect.monitors  # type: ignore[attr-defined]
        assert monitor.poll(TIMEOUT_MS)
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        assert event == (zmq.EVENT_HANDSHAKE_SUCCEEDED if is_known else zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        if is_known:
            assert replay(replays)[-1][0] == 0
    finally:
        publisher.close()


def test_an_address_that_other_machines_reach_needs_keys_and_one_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="prompt text"):
        ZmqPublisher(KVEventsConfig(True, endpoint="tcp://192.0.2.1:5557"), None)
    with pytest.raises(EngineStartError, match=r"cannot be listened on"):
        ZmqPublisher(KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/{'x' * 200}"), None)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(EngineStartError, match="other users"):
        ZmqPublisher(KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/open/events"), None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"endpoint": "tcp://*:5557"}, "names no address"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "names no address"),
        ({"endpoint": "tcp://[::]:5557"}, "names no address"),
        ({"endpoint": "tcp://localhost:5557"}, "names no address"),
        ({"endpoint": "udp://127.0.0.1:1"}, "must be tcp://"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "port"),
        ({"endpoint": "ipc://"}, "must be tcp://"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "differ"),
        ({"publisher": "kafka"}, "publisher"),
        ({"hwm": 0}, "hwm"),
        ({"buffer_steps": 10**8}, "buffer_steps"),
        ({"topic": "t" * 257}, "topic"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        KVEventsConfig(True, **fields)


def test_nothing_is_published_unless_that_is_asked_for() -> None:
    for events in (None, KVEventsConfig(False), KVEventsConfig(True, publisher="null")):
        config = EngineConfig(ModelRunnerConfig("echo"), runner="echo", kv_events=events)
        news = build_engine_core(replace(config, num_blocks=8)).observers.cache_news
        assert news is not None
        assert news._publisher is None


def numbered(*names, salt=""):
    """Numbers of items of 4 tokens; the placeholder is token 7."""
    numbers = MediaNumbers()
    media = tuple(MediaItem(name * 32, "image", 4 * place, 4, num_units=1) for place, name in enumerate(names))
    numbers.number([7] * 4 * len(names), PrefixMedia(salt, media))
    return numbers


def test_an_item_is_published_as_its_placeholder_with_its_digest_beside():
    encoder = EventEncoder(3, 1, numbered(b"c", b"d"))
    event = BlockStored((64, 65, 66, 67), 0, (5, -2, -2, 6, 5, 6, -3, -9), 2)
    ((_, (stored,), _),) = encoder.batches([event], 0.0, is_whole=False)
    assert stored[3] == [5, 7, 7, 6, 5, 6, 7, 0]
    assert stored[8] == [[("63" * 32, 1)], [("63" * 32, 0)], None, [("64" * 32, 0), ("forgotten-8", 1)]]
    ((_, (plain,), _),) = encoder.batches([BlockStored((128,), 0, (5, 6), 2)], 0.0, is_whole=False)
    assert len(plain) == 8


def test_a_router_finds_the_prefix_of_a_prompt_with_the_same_item_in_any_engine_core_and_not_of_another():
    size = 128
    prompt = [5, *[7] * 4, *range(1, 252)]
    item = MediaItem(b"d" * 32, "image", 1, 4, num_units=1)
    keys = []
    for numbers, number in ((numbered(b"d"), 1), (numbered(b"c", b"d"), 2)):  # two engine cores
        manager = KVCacheManager(16, size)
        news = CacheNews(manager, numbers=numbers)
        news.follow()
        own_keys = media_keys(prompt, [(number, item)])
        manager.allocate_slots("a", 256)
        manager.cache_blocks("a", own_keys, 256)
        news.read()
        update = news.take()
        keys.append(unpack_keys(update.added))
    assert keys[0] == keys[1] == tuple(segment_keys(routing_keys(prompt, [item]), size))
    other = replace(item, digest=b"e" * 32)
    assert not set(keys[0]) & set(segment_keys(routing_keys(prompt, [other]), size))
    assert not set(keys[0]) & set(segment_keys(prompt, size))
    assert routing_keys(prompt, ()) is prompt
