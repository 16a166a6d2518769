"""The configuration of published cache events, and their form in messages."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_engine_core.media_keys import published
from llmstack_kv_cache import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    CompanionRemoved,
    CompanionStored,
    KVCacheEvent,
)

MEDIUM: Final = "GPU"  # vLLM's word for the first tier, on a CPU too
_MAX_EVENTS_PER_BATCH: Final = 256
# An identity grows by 64 for each run of blocks: 40 bits last for 17 billion runs.
_IDENTITY_BITS: Final = 40
_ADAPTER_MARK: Final = "\x01"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Publication of the events of the prefix cache, under vLLM's names.

    Attributes:
        enable_kv_cache_events: Whether they are.
        publisher: `zmq`, or `null` for nothing.
        endpoint: The address of a PUB socket. Each further engine core takes the next port, or a suffix of the path.
        replay_endpoint: The address of a ROUTER socket that sends past batches again; empty for none.
        buffer_steps: Past batches that are kept for it.
        hwm: Batches that wait for one slow subscriber; it misses those above.
        max_queue_size: Batches that wait to be published; where there are more, everything is published again later.
        topic: The first frame of each message.
        data_parallel_rank: Which of several engine cores this is.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f"publisher must be 'zmq' or 'null', but is {self.publisher[:64]!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, name) <= 10_000_000:
                raise ValueError(f"{name} must lie in [1, 10000000], but is {getattr(self, name)}")
        if len(self.topic) > 256:
            raise ValueError("topic must have at most 256 characters")
        if not 0 <= self.data_parallel_rank < 65_536:
            raise ValueError("data_parallel_rank must lie in [0, 65535]")
        endpoints = [self.endpoint] if self.replay_endpoint is None else [self.endpoint, self.replay_endpoint]
        for endpoint in endpoints:
            check_endpoint(endpoint)
        if len(set(endpoints)) != len(endpoints):
            raise ValueError("endpoint and replay_endpoint must differ")

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """The addresses at which this engine core publishes and replays."""
        rank, replay = self.data_parallel_rank, self.replay_endpoint
        return _of_rank(self.endpoint, rank), None if replay is None else _of_rank(replay, rank)

    def exposed_endpoint(self) -> str | None:
        """The first endpoint that other machines can reach, if there is one."""
        return next((one for one in (self.endpoint, self.replay_endpoint) if one and not _is_local(one)), None)


def check_endpoint(endpoint: str) -> None:
    """Refuses what is no named address.

    Raises:
        ValueError: Names the endpoint.
    """
    if endpoint.startswith("ipc:///") and len(endpoint) > len("ipc:///"):
        return
    host, port = _host_and_port(endpoint)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified:
        raise ValueError(
            f"{endpoint[:256]!r} names no address; give the one to listen on, such as tcp://127.0.0.1:5557"
        )
    if not 0 < port < 65_536:
        raise ValueError(f"the port of {endpoint[:256]!r} must lie in [1, 65535]")


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not (port.isascii() and port.isdecimal() and len(port) < 6):
        raise ValueError(f"{endpoint[:256]!r} must be tcp://ADDRESS:PORT or ipc:///PATH")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_local(endpoint: str) -> bool:
    return endpoint.startswith("ipc://") or ipaddress.ip_address(_host_and_port(endpoint)[0]).is_loopback


def _of_rank(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    start, _, port = endpoint.rpartition(":")
    return f"{start}:{int(port) + rank}"


class EventEncoder:
    """Makes plain lists of events, in the arrays of vLLM's batches: the kind, then the fields in order.

    The identities of blocks begin with a number of this run of the engine core, so that those of another run differ.
    """

    def __init__(self, run_number: int, data_parallel_rank: int, numbers: MediaNumbers | None = None) -> None:
        """`run_number`: Random, of 23 bits. `numbers`: Of the items in keys below 0."""
        self._numbers = numbers
        self._base = run_number << _IDENTITY_BITS
        self._rank = data_parallel_rank
        self._adapters: dict[int, str] = {}  # by the identity of a block that an adapter computed

    def batches(self, events: Iterable[KVCacheEvent], time_s: float, *, is_whole: bool) -> Iterator[list[object]]:
        """The events in batches; those of a whole cache begin with the removal of all."""
        plain: Iterator[list[object]] = map(self._event, events)
        first = [["AllBlocksCleared"]] if is_whole else []
        if is_whole:
            self._adapters.clear()
        while batch := first + list(islice(plain, _MAX_EVENTS_PER_BATCH)):
            yield [time_s, batch, self._rank]
            first = []

    def _event(self, event: KVCacheEvent) -> list[object]:
        match event:
            case BlockStored():
                parent = None if event.parent_identity == 0 else self._base | event.parent_identity
                adapter = self._adapter(event)
                token_ids, extra_keys = published(event, self._numbers)
                more = [] if extra_keys is None and event.group is None else [extra_keys]
                return [
                    "BlockStored", self._hashes(event.identities), parent, list(token_ids), event.block_size, None,
                    MEDIUM, adapter, *more, *([] if event.group is None else [event.group]),
                ]  # fmt: skip
            case BlockRemoved():
                for identity in event.identities if self._adapters else ():
                    self._adapters.pop(identity, None)
                group = [] if event.group is None else [event.group]
                return ["BlockRemoved", self._hashes(event.identities), MEDIUM, *group]
            case CompanionStored():
                hashes = self._hashes(event.identities)
                return ["BlockStored", hashes, None, [], event.block_size, None, MEDIUM, None, None, event.group]
            case CompanionRemoved():
                return ["BlockRemoved", self._hashes(event.identities), MEDIUM, event.group]
            case AllCleared():
                self._adapters.clear()
                return ["AllBlocksCleared"]

    def _hashes(self, identities: Iterable[int]) -> list[int]:
        return [self._base | identity for identity in identities]

    def _adapter(self, event: BlockStored) -> str | None:
        if event.parent_identity:
            adapter = self._adapters.get(event.parent_identity)
        else:
            _, mark, rest = event.salt.partition(_ADAPTER_MARK)
            adapter = rest.partition(_ADAPTER_MARK)[0] or None if mark and event.salt.startswith(mark) else None
        if adapter is not None:
            self._adapters.update(dict.fromkeys(event.identities, adapter))
        return adapter
