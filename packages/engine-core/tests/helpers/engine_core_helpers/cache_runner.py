"""A model runner whose tokens depend on what its blocks hold."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from zlib import crc32

from llmstack_core_scheduler.media_numbers import vector_places
from llmstack_engine_core.testing import EchoOutput
from llmstack_types import ModelRunnerOutput, SchedulerOutput, TokenLogprobs

VOCAB_SIZE, BLOCK_SIZE = 31, 4


class CacheRunner:
    """A model whose next token depends on what the blocks of its row hold, which a test may change."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.num_steps = 0
        self.weight = 0  # which the values of all blocks depend on
        self._texts: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._vectors: dict[str, dict[int, int]] = {}  # by place, of items

    def execute_model(self, scheduled: SchedulerOutput) -> EchoOutput:
        self.num_steps += 1
        for new in scheduled.new_requests:
            self._texts[new.request_id], self._tables[new.request_id] = new.token_ids, []
            self._vectors[new.request_id] = {
                place: 1000 + crc32(item.digest) + place - item.offset
                for _, item in new.media for places in vector_places(item) for place in places
            }  # fmt: skip
        sampled, logprobs = [], {}
        for row in scheduled.scheduled_requests:
            text, table = self._texts[row.request_id], self._tables[row.request_id]
            vectors = self._vectors[row.request_id]
            table += row.new_block_ids
            end = row.num_computed_tokens + row.num_scheduled_tokens
            places = [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(end)]
            for place in range(row.num_computed_tokens, end):
                self.slots[places[place]] = vectors.get(place, text[place]) + self.weight
            read = sum((number + 1) * self.slots[place] for number, place in enumerate(places))
            sampled.append([read % VOCAB_SIZE] if end == len(text) else [])
            text += sampled[-1]
            entry = TokenLogprobs((read % VOCAB_SIZE,), (-1.0 / (1 + read),), 1)
            logprobs[row.request_id] = [entry] if sampled[-1] else []
        return EchoOutput(
            ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], sampled, logprobs)
        )

    def kv_block_form(self) -> tuple[int, int, str]:
        return BLOCK_SIZE * 8, 0, ""

    def read_kv_blocks(self, block_ids: Sequence[int], out: memoryview, state_id: int = 0) -> None:
        assert state_id == 0
        places = [block_id * BLOCK_SIZE + slot for block_id in block_ids for slot in range(BLOCK_SIZE)]
        out[:] = struct.pack(f"<{len(places)}q", *(self.slots[place] for place in places))

    def write_kv_blocks(self, block_ids: Sequence[int], data: memoryview, first: int = 0, state_id: int = 0) -> None:
        assert state_id == 0
        values = struct.unpack(f"<{len(data) // 8}q", data)[first * BLOCK_SIZE :]
        assert len(values) == len(block_ids) * BLOCK_SIZE
        places = [block_id * BLOCK_SIZE + slot for block_id in block_ids for slot in range(BLOCK_SIZE)]
        self.slots.update(zip(places, values, strict=True))

    def shutdown(self) -> None:
        """There is nothing to release."""
