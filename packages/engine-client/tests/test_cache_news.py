"""What an engine core reports about its prefix cache, and what its followers make of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmstack_engine_client import BalancedClient
from llmstack_engine_client.clients.async_inproc import AsyncInprocClient
from llmstack_engine_client.routing import RoutingIndex
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.cache_news import CacheNews
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.messages.control import ControlCall
from llmstack_engine_core.messages.protocol import CacheUpdate, EngineMessage, FollowCache, Hello
from llmstack_kv_cache import KVCacheManager, segment_keys
from llmstack_types import Control, EngineCoreRequest, ModelRunnerConfig, SamplingParams

CONFIG = EngineConfig(ModelRunnerConfig("echo", block_size=16), runner="echo", num_blocks=64)
PROMPT = [1 + number % 200 for number in range(500)]
KEYS = segment_keys(PROMPT, 16)


class Loop(EngineLoop):
    """A loop that the test drives."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        super().__init__(build_engine_core(config))
        self.sent: list[tuple[bytes, EngineMessage]] = []
        self.inbox: list[tuple[bytes, object]] = []

    def say(self, client: bytes, *messages: object) -> None:
        self.inbox += [(client, message) for message in messages]
        self.run_once()
        while self._core.has_unfinished_requests():
            self.run_once()

    def updates(self, client: bytes) -> list[CacheUpdate]:
        return [message for to, message in self.sent if to == client and isinstance(message, CacheUpdate)]

    def _receive(self, wait_ms: int) -> bool:
        inbox, self.inbox = self.inbox, []
        for client, message in inbox:
            self._handle(client, message)  # type: ignore[arg-type]  # the tests send what clients send
        return bool(inbox)

    def _send(self, client: bytes, message: EngineMessage) -> None:
        self.sent.append((client, message))


def request(request_id: str, prompt: list[int] = PROMPT, **fields: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=2, seed=0), **fields)


def known(loop: Loop, client: bytes) -> int:
    """How many segments of the prompt a follower finds from all that it got, in an unbroken row of numbers."""
    index = RoutingIndex(1)
    applied = [index.apply(0, update) for update in loop.updates(client)]
    assert all(applied)
    return index.find(KEYS)[0]


def test_a_follower_gets_what_is_cached_and_then_every_change() -> None:
    loop = Loop()
    loop.say(b"a", Hello(), request("before"))
    loop.say(b"b", Hello())
    loop.say(b"a", FollowCache())
    assert [update.is_whole for update in loop.updates(b"a")] == [True]
    assert known(loop, b"a") == len(KEYS) == 3
    loop.say(b"a", request("other", [7] * 500, cache_salt="tenant"))
    loop.say(b"b", FollowCache())
    assert known(loop, b"a") == known(loop, b"b") == 3
    assert len(loop.updates(b"a")) > len(loop.updates(b"b")) == 1
    loop.say(b"a", ControlCall(1, Control.RESET_PREFIX_CACHE))
    assert known(loop, b"a") == known(loop, b"b") == 0
    loop.say(b"a", request("again"))
    assert known(loop, b"a") == known(loop, b"b") == 3


def test_without_followers_the_cache_notes_no_events() -> None:
    loop = Loop()
    loop.say(b"a", Hello(), request("r"))
    news = loop._core.observers.cache_news
    assert news is not None
    assert (news._cache._events, news.take(), loop.updates(b"a")) == (None, None, [])


def test_a_cache_in_which_nothing_is_found_is_not_followed() -> None:
    loop = Loop(replace(CONFIG, enable_prefix_caching=False))
    loop.say(b"a", Hello(), FollowCache(), request("r"))
    assert loop.updates(b"a") == []


@pytest.mark.parametrize("seed", range(3))
def test_after_random_requests_and_evictions_a_follower_knows_what_the_cache_finds(seed: int) -> None:
    rng, loop = random.Random(seed), Loop()
    loop.say(b"a", Hello(), FollowCache())
    prompts = [[start] * 140 + list(range(1, 200 + 30 * start)) for start in range(1, 7)]
    for number in range(40):
        loop.say(b"a", request(str(number), rng.choice(prompts)))
        index = RoutingIndex(1)
        applied = [index.apply(0, update) for update in loop.updates(b"a")]
        assert all(applied)
        news = loop._core.observers.cache_news
        assert news is not None
        for prompt in prompts:
            found, _ = news._cache._prefix_index.find(prompt, len(prompt) // 16, "")
            assert index.find(segment_keys(prompt, 16)) == [len(found) // 8]


def test_where_events_were_given_up_everything_is_read_again() -> None:
    cache = KVCacheManager(num_blocks=40, block_size=16)
    news = CacheNews(cache)
    assert news.follow().is_whole
    events = cache._events
    assert events is not None
    events._events = type(events._events)(maxlen=1)
    for name, start in (("a", 0), ("b", 1000)):
        prompt = list(range(start, start + 256))
        cache.allocate_slots(name, 256)
        cache.cache_blocks(name, prompt, 128)
        cache.cache_blocks(name, prompt, 256)
    news.read()
    update = news.take()
    assert update is not None
    assert (update.is_whole, len(update.added)) == (True, 4 * 8)


async def test_requests_with_a_common_prefix_meet_in_one_engine_core() -> None:
    client = BalancedClient([AsyncInprocClient(CONFIG), AsyncInprocClient(CONFIG)])
    try:
        await client.wait_until_ready()
        engines = []
        for number in range(6):
            prompt = [number % 2 + 1] * 300 + [number]
            await client.add_request(request(str(number), prompt))
            engines.append(client._request_id_to_index[str(number)])
            while str(number) in client._request_id_to_index:
                outputs = await client.get_outputs()
                cached = [output.num_cached_tokens for output in outputs.outputs if output.num_cached_tokens >= 0]
                assert all(count == (288 if number > 1 else 0) for count in cached)
        assert engines == [0, 1, 0, 1, 0, 1]
    finally:
        await client.shutdown()
