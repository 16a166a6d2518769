"""Publishes the events of the prefix cache over ZeroMQ, with a buffer for replays."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgpack  # type: ignore[import-untyped]  # it ships no types
import zmq

from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_engine_core.ipc.key_check import check_public_keys
from llmstack_engine_core.ipc.keys import read_keys
from llmstack_engine_core.ipc.sockets import check_private_directory, has_message
from llmstack_engine_core.kv_events import EventEncoder, KVEventsConfig
from llmstack_kv_cache import KVCacheEvent
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

MAX_BUFFERED_BYTES: Final = 64 << 20
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_MAX_REQUEST_BYTES: Final = 4096  # a handshake takes some 300
_CLOSE_TIMEOUT_S: Final = 1.0
_QUEUE_ADDRESS: Final = "inproc://events"


class ZmqPublisher:
    """Sends batches as (topic, number, msgpack) with consecutive numbers of 8 bytes.

    The caller's thread encodes and never waits. Another thread sends, and answers replays. A batch that does not fit
    into the queue leaves a gap in the numbers.
    """

    def __init__(self, config: KVEventsConfig, key_file: str | None, numbers: MediaNumbers | None = None) -> None:
        """`key_file`: CURVE keys, which a subscriber needs too; without them only this machine is served.

        `numbers`: Of the items in keys below 0.

        Raises:
            EngineStartError: An endpoint cannot be listened on, or others could read it.
        """
        if key_file is None and (exposed := config.exposed_endpoint()):
            raise EngineStartError(
                f"--kv-events-config: other machines can reach {exposed}, and events are prompt text; "
                "give --engine-key-file, or an address of this machine alone"
            )
        self._keys = None if key_file is None else read_keys(Path(key_file))
        self._encoder = EventEncoder(secrets.randbits(23), config.data_parallel_rank, numbers)
        self._number = 0
        self._pack = msgpack.Packer(autoreset=True).pack
        self._context = zmq.Context()
        try:
            self._queue = self._socket(zmq.PUSH, config.max_queue_size)
            self._queue.bind(_QUEUE_ADDRESS)
            self._sender = self._make_sender(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Iterable[KVCacheEvent], *, is_whole: bool) -> bool:
        """Queues events; False where the queue is full, so that everything has to be published again."""
        for batch in self._encoder.batches(events, time.time(), is_whole=is_whole):
            number, self._number = self._number, self._number + 1
            try:
                self._queue.send_multipart([number.to_bytes(8, "big"), self._pack(batch)], zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def close(self) -> None:
        """Sends what waits for at most a second, and ends. Idempotent."""
        if self._queue.closed:
            return
        self._queue.setsockopt(zmq.SNDTIMEO, int(1000 * _CLOSE_TIMEOUT_S))
        try:
            self._queue.send(b"")
        except zmq.Again:
            logger.warning("the last cache events are not published")
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._queue.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _make_sender(self, config: KVEventsConfig) -> _Sender:
        endpoint, replay_endpoint = config.endpoints
        queue = self._socket(zmq.PULL, 1)
        queue.connect(_QUEUE_ADDRESS)
        if self._keys is not None:
            check_public_keys(self._context, self._keys.accepted)
        publications = self._bind(zmq.PUB, endpoint, config.hwm)
        replays = None if replay_endpoint is None else self._bind(zmq.ROUTER, replay_endpoint, config.buffer_steps + 1)
        return _Sender(queue, publications, replays, config)

    def _bind(self, kind: int, endpoint: str, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._socket(kind, high_water_mark)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if self._keys is not None and endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"llmstack")
        try:
            if endpoint.startswith("ipc://"):
                check_private_directory(Path(endpoint.removeprefix("ipc://")).parent)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EngineStartError(f"--kv-events-config: {endpoint} cannot be listened on: {error.strerror}") from error
        return socket

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        return socket


class _Sender:
    """The thread that owns the sockets to other programs. It sleeps while there is nothing to do."""

    def __init__(
        self,
        queue: zmq.Socket[bytes],
        publications: zmq.Socket[bytes],
        replays: zmq.Socket[bytes] | None,
        config: KVEventsConfig,
    ) -> None:
        self._queue = queue
        self._publications = publications
        self._replays = replays
        self._topic = config.topic.encode()
        self._max_batches = config.buffer_steps
        self._buffer: deque[tuple[bytes, bytes]] = deque()
        self._num_bytes = 0

    def run(self) -> None:
        """Publishes until an empty message comes."""
        poller = zmq.Poller()
        sockets = [socket for socket in (self._queue, self._replays) if socket is not None]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = {socket for socket, _ in poller.poll()}
            is_open = self._publish_all()  # first, so that a replay has whatever was published before it
            if self._replays is not None and self._replays in ready:
                self._replay(self._replays)
        for socket in [*sockets, self._publications]:
            socket.close(linger=int(1000 * _CLOSE_TIMEOUT_S) if socket is self._publications else 0)

    def _publish_all(self) -> bool:
        """Sends what waits in the queue; False once the end has been asked for."""
        while has_message(self._queue):
            frames = self._queue.recv_multipart()
            if len(frames) != 2:
                return False
            self._publish(*frames)
        return True

    def _publish(self, number: bytes, payload: bytes) -> None:
        self._publications.send_multipart([self._topic, number, payload])  # a slow subscriber misses it
        if self._replays is not None:
            self._buffer.append((number, payload))
            self._num_bytes += len(payload)
            while len(self._buffer) > self._max_batches or self._num_bytes > MAX_BUFFERED_BYTES:
                self._num_bytes -= len(self._buffer.popleft()[1])

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        """Sends what is kept from a number on, and an end."""
        frames = replays.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(END_OF_REPLAY):
            return
        client, _, start = frames  # numbers of one length are in the order of their bytes
        for number, payload in self._buffer:
            if number >= start:
                replays.send_multipart([client, b"", number, payload], zmq.NOBLOCK)
        replays.send_multipart([client, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
