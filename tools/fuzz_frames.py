"""Sends an engine core random, cut, oversized and out-of-domain frames.

    python tools/fuzz_frames.py --frames 1000000 --seed 7 [--model FOLDER]

The engine core must live, and the streams beside the frames must be those of an undisturbed run. Without a model an
echo runner serves. The frames follow from the seed alone.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
import zmq

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.engine_core_proc import EngineCoreProc
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.messages.control import ControlCall
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, ENGINE_MESSAGES, AbortRequests, Goodbye, Hello
from llmstack_types import (
    Control,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerConfig,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    StructuredOutputsParams,
)

GOOD = b"good"
FRAMES_PER_STEP = 8
FRAMES_PER_VISIT = 64  # then the sender says hello again, which ends its requests
MAX_LENGTH = 96
ODD_NUMBERS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    96,
    97,
    127,
    128,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**63,
    2**64 - 1,
)
ODD_FLOATS = (
    0.0,
    -0.0,
    5e-324,
    1e-30,
    0.5,
    1.0,
    -1.0,
    2.0,
    1e6,
    1e38,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
)
ODD_TEXTS = (
    "",
    "r",
    "good-0",
    "good-1",
    "x" * 513,
    "\x00",
    "ä" * 40,
    "never",
    "delta",
    "embed",
    "classify",
    "lora",
    "a@d.1",
)


class Frames:
    """An endless, seeded sequence of (client, frames)."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (the same seed has to give the same frames)
        self._vocab_size = vocab_size
        self._num_requests = 0
        self._kinds: tuple[Callable[[], list[bytes]], ...] = (
            self._random_bytes, self._cut, self._flipped, *[self._replaced] * 5, *[self._odd_request] * 6,
            *[self._declared] * 3, self._control, self._abort, self._several, self._greeting,
        )  # fmt: skip
        nested = msgpack.packb([[[]] * 60_000] * 60)
        self._large = (b"\x00" * (CLIENT_MESSAGES.max_bytes + 1), nested, b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000)

    def __iter__(self) -> Iterator[tuple[bytes, list[bytes]]]:
        number = 0
        while True:
            number += 1
            client = b"known" if self._random.random() < 0.95 else self._random.randbytes(5)
            if number % FRAMES_PER_VISIT == 1:
                yield b"known", [CLIENT_MESSAGES.encode(Hello())]
            elif self._random.random() < 0.0005:
                yield client, [self._random.choice(self._large)]
            else:
                yield client, self._random.choice(self._kinds)()

    def _random_bytes(self) -> list[bytes]:
        return [self._random.randbytes(self._random.randrange(200))]

    def _cut(self) -> list[bytes]:
        frame = self._valid()
        return [frame[: self._random.randrange(len(frame))]]

    def _flipped(self) -> list[bytes]:
        frame = bytearray(self._valid())
        for _ in range(self._random.randint(1, 4)):
            frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return [bytes(frame)]

    def _replaced(self) -> list[bytes]:
        """A valid message with one value replaced by another, at any depth."""
        values = msgpack.unpackb(self._valid())
        place = values
        while True:
            index = self._random.randrange(len(place))
            if isinstance(place[index], list) and place[index] and self._random.random() < 0.7:
                place = place[index]
                continue
            place[index] = self._odd_value(place[index])
            return [msgpack.packb(values)]

    def _odd_value(self, value: Any) -> Any:
        pick = self._random.random()
        if pick < 0.5:
            if isinstance(value, bool):
                return not value
            if isinstance(value, int | float):
                return self._random.choice(ODD_NUMBERS + ODD_FLOATS)
            if isinstance(value, bytes):
                return self._random.randbytes(4 * self._random.randrange(40))
            if isinstance(value, str):
                return self._random.choice(ODD_TEXTS)
        others: tuple[Any, ...] = (
            *ODD_NUMBERS,
            *ODD_FLOATS,
            *ODD_TEXTS,
            None,
            True,
            [],
            [[], []],
            [1, "a"],
            b"",
            b"\x00" * 8,
            b"abc",
        )
        return self._random.choice(others)

    def _valid(self) -> bytes:
        if self._random.random() < 0.3:
            return CLIENT_MESSAGES.encode(CLIENT_MESSAGES.draw(self._random))
        return CLIENT_MESSAGES.encode(self._request())

    def _declared(self) -> list[bytes]:
        """Any message that a client may send, as it is declared, often with values at their bounds."""
        return [CLIENT_MESSAGES.encode(CLIENT_MESSAGES.draw(self._random))]

    def _odd_request(self) -> list[bytes]:
        """A request that can be encoded, whose fields can be outside of what the model accepts."""
        try:
            return [CLIENT_MESSAGES.encode(self._request(oddness=0.3))]
        except CodecError:
            return [b""]

    def _request(self, oddness: float = 0.0) -> EngineCoreRequest:
        pick = self._random

        def odd(usual: Any, *others: Any) -> Any:
            return pick.choice(others) if pick.random() < oddness / 4 else usual

        self._num_requests += 1
        ids = [pick.randrange(self._vocab_size) for _ in range(pick.randint(1, 12))]
        beyond = (self._vocab_size, 2**31, 2**32 - 1)
        is_pooling = pick.random() < oddness / 4
        is_beams = pick.random() < 0.1
        params = SamplingParams(
            n=odd(pick.randint(1, 3) if is_beams else 1, 0, 2, 97, 128, 2**31 - 1),
            temperature=odd(pick.choice((0.0, 1.0)), *ODD_FLOATS),
            top_p=odd(1.0, *ODD_FLOATS), min_p=odd(0.0, *ODD_FLOATS), typical_p=odd(1.0, *ODD_FLOATS),
            top_k=odd(0, *ODD_NUMBERS), seed=odd(7, None, *ODD_NUMBERS),
            presence_penalty=odd(0.0, *ODD_FLOATS), frequency_penalty=odd(0.0, *ODD_FLOATS),
            repetition_penalty=odd(1.0, *ODD_FLOATS),
            max_tokens=odd(0 if is_pooling else pick.randint(1, 4), None, *ODD_NUMBERS),
            min_tokens=odd(0, *ODD_NUMBERS),
            logprobs=odd(None, *ODD_NUMBERS), prompt_logprobs=odd(None, *ODD_NUMBERS),
            stop_token_ids=odd(None, (), (0,), beyond), allowed_token_ids=odd(None, (), (0,), (96, 97), beyond),
            logit_bias=odd(None, {}, {0: 1e6}, {1: math.nan}, dict.fromkeys(beyond, 1.0)),
            bad_words_token_ids=odd((), ((),), ((1,), ()), (beyond,), ((1,),) * 5000),
            extra_args=odd(None, {"a": 1}, {"b": [1.0, "x", None]}, {"c": math.inf}),
            use_beam_search=is_beams, length_penalty=odd(1.0, *ODD_FLOATS), early_stopping=odd(False, True, "never"),
            structured_outputs=odd(
                None, StructuredOutputsParams(regex="[ab]+"), StructuredOutputsParams(),
                StructuredOutputsParams(json="{"),
            ),
        )  # fmt: skip
        return EngineCoreRequest(
            odd(f"bad-{self._num_requests}", "good-0", "bad-1", "bad-1/beam-1"),
            odd(ids, [self._vocab_size], ids * 40, [2**32 - 1], [0] * MAX_LENGTH),
            params,
            eos_token_ids=odd((), (0,), beyond, tuple(range(self._vocab_size))),
            arrival_time_s=odd(time.monotonic(), *ODD_FLOATS),
            priority=odd(0, *ODD_NUMBERS),
            cache_salt=odd("", *ODD_TEXTS),
            lora_name=odd(None, *ODD_TEXTS),
            fork_of=odd("", "good-0", "good-1", f"bad-{self._num_requests - 1}"),
            pooling_params=self._pooling_params(odd) if is_pooling else None,
            output_token_ids=odd((), (1,), (1,) * 200, beyond),
            tenant=odd("", *ODD_TEXTS),
            lora_path=odd("", *ODD_TEXTS),
        )

    def _pooling_params(self, odd: Callable[..., Any]) -> PoolingParams:
        task = odd(PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED)
        return PoolingParams(task=task, dimensions=odd(None, *ODD_NUMBERS), second_text_start=odd(None, *ODD_NUMBERS))

    def _control(self) -> list[bytes]:
        calls = (
            (Control.RESET_PREFIX_CACHE, ()), (Control.STATS, ()), (Control.SHUTDOWN, ()), (Control.SLEEP, (1,)),
            (Control.RECENT_STEPS, (0,)), (Control.WAKE_UP, ()), (Control.SLEEP_LEVEL, ()), (Control.SLEEP, (2,)),
        )  # fmt: skip
        operation, arguments = self._random.choice(calls)
        return [CLIENT_MESSAGES.encode(ControlCall(self._random.randrange(2**40), operation, arguments))]

    def _abort(self) -> list[bytes]:
        names = ("good-0", "good-1", f"bad-{self._num_requests}", "bad-1/beam-1", "no such", "x" * 512)
        return [CLIENT_MESSAGES.encode(AbortRequests(tuple(self._random.choices(names, k=self._random.randrange(6)))))]

    def _several(self) -> list[bytes]:
        return [self._valid() for _ in range(self._random.choice((0, 2, 3)))]

    def _greeting(self) -> list[bytes]:
        return [CLIENT_MESSAGES.encode(self._random.choice((Hello(), Goodbye())))]


class FuzzedLoop(EngineCoreProc):
    """The loop of an engine core's process, whose messages are frames as on a socket but pass through none."""

    def __init__(self, config: EngineConfig) -> None:
        EngineLoop.__init__(self, build_engine_core(config))
        self._socket = self  # type: ignore[assignment]  # it sends as one
        self._num_refused = self._epoch = 0
        self._gone = set()
        self._progress = None  # no process watches it
        self.tokens: dict[str, list[Any]] = {}
        self.ended: dict[str, str] = {}
        self._next = 0
        self._receiver = b""
        self._receive_frames(GOOD, [CLIENT_MESSAGES.encode(Hello())])

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Notes what the good client receives; every message must be one that a client accepts."""
        if flags & zmq.SNDMORE:
            self._receiver = frame
            return
        client = self._receiver
        message = ENGINE_MESSAGES.decode(frame)[1]
        if client != GOOD or not isinstance(message, EngineCoreOutputs):
            return
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).append((output.new_token_ids, output.logprobs))
            if output.finish_reason is not None:
                self.ended[output.request_id] = f"{output.finish_reason} {output.error}"

    def step(self) -> None:
        """One step, beside which the good client always has two requests; it ends a sleep first."""
        if self._core.sleep_level:
            self._receive_frames(GOOD, [CLIENT_MESSAGES.encode(ControlCall(0, Control.WAKE_UP, ()))])
        while self._next - len(self.ended) < 2:
            self._receive_frames(GOOD, [CLIENT_MESSAGES.encode(good_request(self._next))])
            self._next += 1
        self._send_outputs(self._core.step())

    def finish(self) -> None:
        """Lets the good client's last requests end."""
        while len(self.ended) < self._next:
            self._send_outputs(self._core.step())
        while self._core.has_unfinished_requests():
            self._send_outputs(self._core.step())

    def leftovers(self) -> list[str]:
        """What is still held though no client has a request."""
        stats = self._core.stats()
        figures = {"running": stats.num_running, "waiting": stats.num_waiting, "clients": len(self._clients) - 1}
        figures["used blocks"] = stats.num_blocks - stats.num_free_blocks
        figures["owners"] = len(self._request_id_to_client)
        return [f"{name}: {number}" for name, number in figures.items() if number]


def good_request(number: int) -> EngineCoreRequest:
    """The number decides all; there are 16 different ones."""
    kind = number % 16
    params = SamplingParams(
        temperature=float(kind % 2),
        seed=kind,
        max_tokens=5 + kind,
        ignore_eos=True,
        logprobs=2 if kind % 3 == 0 else None,
    )
    return EngineCoreRequest(f"good-{number}", [1 + kind, 2, 3 + kind % 5], params)


def run(config: EngineConfig, num_frames: int, seed: int, vocab_size: int) -> list[str]:
    """Everything that is wrong after so many frames; an exception is the death of the engine core."""
    calm = FuzzedLoop(config)
    while not all(f"good-{number}" in calm.ended for number in range(16)):
        calm.step()
    expected = {number: calm.tokens[f"good-{number}"] for number in range(16)}
    loop = FuzzedLoop(config)
    clients: dict[bytes, None] = {b"known": None}
    for number, (client, frames) in enumerate(Frames(seed, vocab_size)):
        if number == num_frames:
            break
        if number % FRAMES_PER_STEP == 0:
            loop.step()
        clients[client] = None
        loop._receive_frames(client, frames)
        if len(clients) > 8:
            _leave(loop, clients)
    _leave(loop, clients)
    loop.finish()
    faults = loop.leftovers()
    for number in range(loop._next):
        name = f"good-{number}"
        if loop.ended[name] != "length None" or _joined(loop.tokens[name]) != _joined(expected[number % 16]):
            faults.append(f"{name} differs: {loop.ended[name]}")
    return faults


def _leave(loop: FuzzedLoop, clients: dict[bytes, None]) -> None:
    for client in clients:
        loop._receive_frames(client, [CLIENT_MESSAGES.encode(Goodbye())])
    clients.clear()
    clients[b"known"] = None


def _joined(steps: list[Any]) -> list[Any]:
    return [
        [token for tokens, _ in steps for token in tokens],
        [entry for _, logprobs in steps for entry in logprobs or ()],
    ]


def config_for(model: str | None) -> EngineConfig:
    """A small engine core over a model's folder, or over the echo runner."""
    limits: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    path = model or "echo?vocab_size=97&num_available_blocks=64"
    return EngineConfig(
        ModelRunnerConfig(path, **limits), runner="default" if model else "echo",
        scheduler=SchedulerConfig(**limits), num_blocks=48, log_level="CRITICAL",
    )  # fmt: skip


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a small model with a vocabulary of 97 tokens or more")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    start_s = time.monotonic()
    faults = run(config_for(arguments.model), arguments.frames, arguments.seed, vocab_size=97)
    print(*faults[:20], sep="\n", end="\n" if faults else "")
    print(f"{arguments.frames} frames in {time.monotonic() - start_s:.0f} s, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
