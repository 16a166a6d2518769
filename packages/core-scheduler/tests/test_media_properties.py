"""Whatever is added, stepped and aborted, prompts with items come to their end, and within the encoder's room."""

from dataclasses import replace

import pytest
from core_scheduler_helpers.stepped_machine import SteppedMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from llmstack_core_scheduler import AlwaysSwap, Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeEncoder, FakeModelRunner
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaSpec, SamplingParams

kv_cache = pytest.importorskip("llmstack_kv_cache")

LAYERS = {"image": 3, "embeds": 0}
MOST = 12
KINDS = st.sampled_from(["image", "image", "embeds"])
ITEMS = st.lists(st.tuples(KINDS, st.integers(0, 4), st.integers(0, 6), st.integers(1, MOST)), max_size=3)


class MediaMachine(SteppedMachine):
    @initialize(
        num_blocks=st.integers(4, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        is_chunked=st.booleans(),
        num_host_blocks=st.sampled_from([0, 50]),
        room=st.integers(1, 3 * MOST),
        units=st.sampled_from([1, 7, 100]),
        form=st.sampled_from(["plain", "atomic", "cross"]),
    )
    def start(self, num_blocks, max_num_seqs, budget, policy, is_chunked, num_host_blocks, room, units, form):
        is_atomic, self.is_cross = form == "atomic", form == "cross"
        if is_atomic:
            budget = max(budget, MOST + max_num_seqs - 1)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if is_chunked else 64,
            max_model_len=64,
            enable_chunked_prefill=is_chunked,
            policy=policy,
            media=MediaSpec(8, LAYERS, is_atomic, {"image": MOST, "embeds": MOST}, self.is_cross),
            encoder_cache_tokens=room,
            encoder_budget_units=units,
        )
        self.manager = kv_cache.KVCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks)
        self.scheduler = Scheduler(self.config, self.manager, preemption=AlwaysSwap())
        self.encoder = FakeEncoder(self.config.media)
        self.runner = FakeModelRunner(num_blocks, 4, num_host_blocks=num_host_blocks, encoder=self.encoder)
        self.under_way, self.requests, self.answers = [], {}, {}

    @rule(
        number=st.integers(0, 12), items=ITEMS, tail=st.integers(1, 20), priority=st.integers(-1, 1), fork=st.booleans()
    )
    def add(self, number, items, tail, priority, fork):
        prompt, media = [], []
        for kind, name, gap, num_tokens in items:
            prompt += range(1, gap + 1)
            # Its size follows from its name: another one under the same name is another item all the same.
            units = 10 * (name + 1) if LAYERS[kind] else 0
            media.append(MediaItem(bytes([name]) * 32, kind, len(prompt), num_tokens, num_units=units))
            prompt += [7] * num_tokens
        if self.is_cross:  # all tokens attend to one item
            media = [
                MediaItem(bytes([name]) * 32, "image", 0, 1, num_units=num_tokens)
                for _, name, _, num_tokens in items[:1]
            ]
            prompt = [7] * len(media)
        prompt += range(1, tail + 1)
        request = EngineCoreRequest(
            str(number), prompt, SamplingParams(max_tokens=5), priority=priority, media=tuple(media)
        )
        if fork and self.requests:
            parent = next(iter(self.requests.values()))
            request = replace(
                parent, request_id=str(number), fork_of=parent.request_id, sampling_params=request.sampling_params
            )
        sizes = [self.config.media.num_vectors(item) for item in request.media]
        room, length = self.config.encoder_cache_tokens, len(request.prompt_token_ids)
        fits = max(sizes, default=0) <= room and (self.config.enable_chunked_prefill or sum(sizes) <= room)
        fits = fits and (len(sizes) == 1 or not self.is_cross)
        fits = fits and length + 5 <= 64 and length + 4 <= self.manager.num_blocks * 4
        before = self.scheduler.stats()
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            assert not fits or request.request_id in self.requests
            assert self.scheduler.stats() == before
        else:
            assert fits
            self.requests[request.request_id], self.answers[request.request_id] = request, []

    @precondition(lambda self: len(self.under_way) < 2)
    @rule()
    def schedule(self):
        first = self.scheduler.running.first() if self.scheduler.running else None
        num_computed = first.num_computed_tokens if first else 0
        scheduled = self.scheduler.schedule(0.0)
        assert scheduled.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        if not self.under_way:
            rows = scheduled.scheduled_requests
            assert rows or scheduled.encoder_work or not self.requests
            if first is not None:
                assert first.num_computed_tokens > num_computed or scheduled.encoder_work
                waits = [one for one in self.scheduler.running if one.num_computed_tokens < one.media_end]
                assert len(rows) >= len(self.scheduler.running) - len(waits)
        self.under_way.append((scheduled, self.runner.execute_model(scheduled)))

    @invariant()
    def the_encoder_keeps_its_room(self):
        cache = self.scheduler._encoding.cache
        entries = dict(cache)
        assert sum(one.num_tokens for one in entries.values()) == cache.num_tokens - cache.num_free_tokens
        assert cache.num_free_tokens >= 0
        assert self.encoder.most_tokens <= cache.num_tokens
        begun = [number for number, one in entries.items() if not one.is_ready]
        assert begun in ([], [self.scheduler._encoding._begun])


TestMediaMachine = MediaMachine.TestCase
TestMediaMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
