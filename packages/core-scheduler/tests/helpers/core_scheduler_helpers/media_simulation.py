"""Simulations whose prompts have items: pictures of few kinds, many of them equal, some broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any

from core_scheduler_helpers.drawn import VOCAB_SIZE, repetitive_token
from core_scheduler_helpers.places import all_advance
from core_scheduler_helpers.simulation import ManagerFactory, Simulation, _expect
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.testing import FakeEncoder, next_token, seen_ids
from llmstack_types import EngineCoreRequest, MediaItem, MediaMemory, MediaSpec, SamplingParams, SchedulerOutput

PLACEHOLDERS = {"image": 7, "embeds": 0}


def draw_items(random: Random, most: int) -> list[MediaItem]:
    """A few items of up to `most` tokens, at place 0; those of pictures may have row breaks."""
    items = []
    for number in range(random.randint(1, 6)):
        kind, num_tokens = random.choice(("image", "image", "embeds")), random.randint(1, most)
        runs = ()
        if kind == "image" and num_tokens > 4 and random.random() < 0.4:
            middle = num_tokens // 2
            runs = ((random.randint(0, 1), middle - 1), (middle + 1, num_tokens - middle - 1))
        digest, num_units = sha256(bytes([number])).digest(), random.randint(1, 40) if kind == "image" else 0
        items.append(MediaItem(digest, kind, 0, num_tokens, runs, (number,), num_units, MediaMemory(1, data=b"m")))
    return items


def draw_media(
    random: Random, config: SchedulerConfig, items: list[MediaItem], *, can_be_atomic: bool
) -> SchedulerConfig:
    """The configuration for a model that takes such items, whose encoder cache may lack room for some."""
    largest = max(item.num_tokens for item in items)
    spec = MediaSpec(8, {"image": random.randint(1, 7), "embeds": 0}, False, {"image": largest, "embeds": largest})
    config = replace(
        config,
        media=spec,
        encoder_cache_tokens=random.choice([0, largest, largest, largest * 3 // 2, max(largest - 1, 1)]),
        encoder_budget_units=random.choice([0, 1, 10, 1000]),
    )
    if can_be_atomic and random.random() < 0.3:
        try:
            return replace(config, media=replace(spec, is_atomic=True))
        except ValueError:
            pass  # its steps are too small
    return config


def draw_cross_attention(random: Random, config: SchedulerConfig) -> tuple[SchedulerConfig, list[MediaItem]]:
    """The configuration for a model whose tokens attend to one item of their prompt, and a few such items."""
    digests = [sha256(bytes([number])).digest() for number in range(random.randint(1, 6))]
    memory = MediaMemory(1, data=b"m")
    items = [MediaItem(one, "image", 0, 1, num_units=random.randint(1, 40), memory=memory) for one in digests]
    spec = MediaSpec(8, {"image": random.randint(1, 7)}, False, {"image": 40}, has_cross_attention=True)
    room, budget = random.choice([0, 40, 40, 60, 39]), random.choice([0, 1, 10, 1000])
    return replace(config, media=spec, encoder_cache_tokens=room, encoder_budget_units=budget), items


class MediaSimulation(Simulation):
    """One run of a model that takes items."""

    def __init__(self, seed: int, *arguments: Any, **named: Any) -> None:
        self.items: list[MediaItem] = []
        self.broken: set[bytes] = set()
        self.has_begun = False
        super().__init__(seed, *arguments, **named)

    def _boot(self) -> None:
        if not self.items and self.random.random() < 0.25:
            self.config, self.items = draw_cross_attention(self.random, self.config)
        elif not self.items:
            self.items = draw_items(self.random, max(min(self.config.max_model_len, self.num_blocks) // 3, 1))
            self.config = draw_media(self.random, self.config, self.items, can_be_atomic=not self._num_state_blocks)
        if not self.has_begun and self.random.random() < 0.2 and not self._num_state_blocks:
            self.broken.add(self.items[0].digest)
        self.has_begun = True
        super()._boot()
        spec = self.config.media
        assert spec is not None
        self.encoder = self.runner.encoder = FakeEncoder(spec, self.broken)

    def _request(self, prompt: list[int], params: SamplingParams, priority: int | None = None) -> EngineCoreRequest:
        if self.config.media is not None and self.config.media.has_cross_attention:
            prompt[0] = PLACEHOLDERS["image"]
            request = super()._request(prompt, params, priority)
            return self._with(request, (self.random.choice(self.items),), self.random.choice(("", "", "other")))
        media, place = [], 0
        while priority is None and self.random.random() < 0.6:
            item = self.random.choice(self.items)
            place += self.random.choice((0, 0, 1, 5))
            item = replace(item, offset=place)
            if item.end > len(prompt):
                break
            for start, length in item.embed_runs or ((0, item.num_tokens),):
                prompt[place + start : place + start + length] = [PLACEHOLDERS[item.kind]] * length
            if item.embed_runs:  # its row breaks follow from the item
                for index in {*range(item.num_tokens)} - {
                    one for start, length in item.embed_runs for one in range(start, start + length)
                }:
                    prompt[place + index] = 9
            media.append(item)
            place = item.end
        salt = self.random.choice(("", "", "other"))
        return self._with(super()._request(prompt, params, priority), tuple(media), salt)

    def _with(self, request: EngineCoreRequest, media: tuple[MediaItem, ...], salt: str) -> EngineCoreRequest:
        if any(item.digest in self.broken for item in media):
            self.failing.add(request.request_id)
        self.totals["items"] += len(media)
        return replace(request, media=media, cache_salt=salt)

    def _add(self, request: EngineCoreRequest) -> None:
        if any(item.digest in self.broken for item in request.media):
            self.failing.add(request.request_id)  # of a copy too, which has an id of its own
        super()._add(request)

    def _child(self, parent: Request, prompt: list[int]) -> EngineCoreRequest:
        media = tuple(item for item in parent.arrival.media if item.end <= len(prompt) - 1)
        child = super()._request(prompt, self._params(), 0)
        return self._with(child, media, parent.arrival.cache_salt)

    def _can_fit(self, request: EngineCoreRequest) -> bool:
        room = self.config.num_encoder_tokens
        assert self.config.media is not None
        sizes = [self.config.media.num_vectors(item) for item in request.media]
        fits = max(sizes, default=0) <= room and (self.config.enable_chunked_prefill or sum(sizes) <= room)
        return fits and super()._can_fit(request)

    def _right_answer(self, request: EngineCoreRequest) -> list[int]:
        params, answer = request.sampling_params, list[int]()
        seen = list(request.prompt_token_ids) if self.has_lookup else seen_ids(request.prompt_token_ids, request.media)
        while len(answer) < (params.max_tokens or 0):
            text = seen + answer
            answer.append(repetitive_token(text) if self.has_lookup else next_token(text, VOCAB_SIZE))
            if answer[-1] in request.eos_token_ids and len(answer) >= params.min_tokens:
                break
        return answer

    def _check_step(self, scheduled: SchedulerOutput, oldest: str | None) -> None:
        rows, work = scheduled.scheduled_requests, scheduled.encoder_work
        row_ids = [row.request_id for row in rows]
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        _expect(scheduled.total_num_scheduled_tokens == num_tokens <= self.config.max_num_batched_tokens, "budget")
        _expect(len(set(row_ids)) == len(row_ids) <= self.config.max_num_rows, "a request has one row")
        _expect(oldest is None or row_ids[:1] == [oldest] or bool(work), "the oldest always advances")
        spec = self.config.media
        assert spec is not None
        for row in rows if spec.is_atomic else ():
            request = next(one for one in self.scheduler.running if one.request_id == row.request_id)
            end = row.num_computed_tokens + row.num_scheduled_tokens
            _expect(not any(item.offset < end < item.end for _, item in request.media), "no item is cut")
        if not self._under_way:
            _expect(bool(rows or work) or not self.alive, "with work there is a step")
            waiting = {one.request_id for one in self.scheduler.running if one.num_computed_tokens < one.media_end}
            has_turns = self.config.pipeline_parallel_size > 1
            _expect(has_turns or all_advance(self.scheduler, row_ids, waiting), "who waits for no item advances")
        self._check_units(scheduled)
        self.totals += Counter(
            steps=1, drafts=sum(len(row.draft_token_ids) for row in rows), swap_outs=len(scheduled.swap_outs),
            swap_ins=len(scheduled.swap_ins), copies=len(scheduled.block_copies), parts=len(work),
            later_parts=sum(one.first_layer > 0 for one in work), rowless=bool(work) and not rows,
        )  # fmt: skip

    def _check_units(self, scheduled: SchedulerOutput) -> None:
        """The encoder keeps its budget, apart from the first layer of a step."""
        most = 8 * (self.config.encoder_budget_units or self.config.max_num_batched_tokens)
        numbers = {number: item for one in self.scheduler.running for number, item in one.media}
        spec = self.config.media
        assert spec is not None
        units, most = 0.0, float(most)
        for part in scheduled.encoder_work:
            item = part.item or numbers.get(part.media_id)
            if item is not None and spec.num_layers[item.kind]:
                is_first, units = not units, units + item.num_units * part.num_layers / spec.num_layers[item.kind]
                most = max(most, units) if is_first else most
        _expect(units <= most, f"the encoder keeps its budget: {units} of {most} in {scheduled.encoder_work}")

    def _check_windows(self, running: Sequence[Request]) -> None:
        """One that waits for the encoder has room for a token that is not computed."""
        super()._check_windows([one for one in running if one.num_slots or not one.media])

    def _check_books(self) -> None:
        super()._check_books()
        stats = self.scheduler.stats().encoder
        assert stats is not None
        _expect(self.encoder.most_tokens <= stats.num_cache_tokens, "the encoder cache keeps its size")
        _expect(stats.num_used_tokens <= self.encoder.num_tokens, "what is counted exists")

    def _check_end(self) -> None:
        super()._check_end()
        stats = self.scheduler.stats().encoder
        assert stats is not None
        self.totals += Counter(
            encoder_hits=stats.num_hits, evictions=stats.num_evictions, repeats=stats.num_repeats,
            encoded=stats.num_encoded,
        )  # fmt: skip
        _expect(self.scheduler.reset_prefix_cache(), "an idle cache can be reset")
        after = self.scheduler.stats().encoder
        _expect(after is not None and after.num_used_tokens == 0, "a reset drops what is encoded")


def run_media_seed(seed: int, make_manager: ManagerFactory, *arguments: Any) -> Counter[str]:
    """What happened in the run of a seed; an exception of the run gets the seed as a note."""
    simulation = MediaSimulation(seed, make_manager, *arguments)
    try:
        simulation.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    return simulation.totals
