"""Serves a model of OpenVINO GenAI through its continuous batching, for comparisons."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import front
import numpy
import openvino
import openvino_genai

Tokens = asyncio.Queue[list[int] | None]


class Running(NamedTuple):
    """A request inside the pipeline."""

    handle: Any
    tokens: Tokens


class Engine:
    """Steps the pipeline in a thread of its own, which sleeps while there is nothing to do."""

    def __init__(self, options: argparse.Namespace) -> None:
        properties = {"INFERENCE_PRECISION_HINT": options.precision, "INFERENCE_NUM_THREADS": options.threads}
        if options.kv:
            properties["KV_CACHE_PRECISION"] = options.kv
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.folder, _scheduler_config(options), "CPU", properties
        )
        self._request_ids = itertools.count()
        self._has_new = threading.Condition()
        self._new: list[tuple[list[int], Any, Tokens]] = []
        self._running: dict[int, Running] = {}

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, token_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> Tokens:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, ignore_eos, False
        tokens: Tokens = asyncio.Queue()
        with self._has_new:
            self._new.append((token_ids, config, tokens))
            self._has_new.notify()
        return tokens

    def _run(self) -> None:
        while True:
            self._take_new()
            self._pipeline.step()
            # One call per step and not per request wakes the event loop once.
            self._loop.call_soon_threadsafe(_deliver, list(self._collect()))

    def _take_new(self) -> None:
        with self._has_new:
            self._has_new.wait_for(lambda: self._new or self._running)
            new, self._new = self._new, []
        for token_ids, config, tokens in new:
            request_id = next(self._request_ids)
            prompt = openvino.Tensor(numpy.array([token_ids], dtype=numpy.int64))
            self._running[request_id] = Running(self._pipeline.add_request(request_id, prompt, config), tokens)

    def _collect(self) -> Iterator[tuple[Tokens, list[int], bool]]:
        for request_id, (handle, tokens) in list(self._running.items()):
            is_finished = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            new: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    new += output.generated_ids
            if is_finished:
                del self._running[request_id]
            yield tokens, new, is_finished


def _scheduler_config(options: argparse.Namespace) -> Any:
    config = openvino_genai.SchedulerConfig()
    config.cache_size = options.cache_gb
    config.max_num_batched_tokens = options.max_num_batched_tokens
    config.dynamic_split_fuse = config.enable_prefix_caching = True
    return config


def _deliver(batch: list[tuple[Tokens, list[int], bool]]) -> None:
    for tokens, new, is_finished in batch:
        if new:
            tokens.put_nowait(new)
        if is_finished:
            tokens.put_nowait(None)


def main() -> None:
    parser = front.parser(__doc__)
    parser.add_argument("--precision", default="bf16", help="of the computation (default: bf16)")
    parser.add_argument("--kv", help="type of the KV cache, such as bf16 (default: OpenVINO's, u8)")
    parser.add_argument("--cache-gb", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    options = parser.parse_args()
    front.serve(options, Engine(options))


if __name__ == "__main__":
    main()
