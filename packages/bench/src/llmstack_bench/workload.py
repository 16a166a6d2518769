"""Random prompts, with or without shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_types.agents import AgentSession

# The first ids of most vocabularies are the tokens unknown, begin and end; random prompts avoid them.
FIRST_TOKEN_ID = 3
# Prompts are encoded before the run, to keep the generator cheap during it. This bounds their memory.
MAX_PROMPT_TOKENS = 50_000_000

Message = Mapping[str, Any]
ToText = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to be sent.

    Attributes:
        prompt: Text, token ids, or the messages of a conversation.
        num_output_tokens: Number of tokens to generate.
        arrival_s: When to send it, in seconds since the run began; None means that the request rate decides.
        has_picture: Whether its messages have a picture.
        session: The session that it begins; None where it is alone.
    """

    prompt: str | list[int] | list[Message]
    num_output_tokens: int
    arrival_s: float | None = None
    has_picture: bool = False
    session: WrittenSession | None = None


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Random prompts of given lengths; equal workloads with equal seeds give equal requests.

    Attributes:
        num_prefix_tokens: Tokens before a prompt's own, which `num_prompts / num_prefixes` of them share.
        range_ratio: Lengths are drawn from `[length * (1 - ratio), length * (1 + ratio)]`; a pair has one for prompts
            and one for outputs.
        vocab_size: Token ids lie below it.
    """

    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    num_prefix_tokens: int = 0
    num_prefixes: int = 1
    range_ratio: float | tuple[float, float] = 0.0
    vocab_size: int = 256
    seed: int = 0

    def requests(self) -> list[BenchRequest]:
        """The requests, in the order in which to send them.

        Raises:
            BenchError: A value is out of range, or the prompts together are too long.
        """
        self._check()
        rng = random.Random(self.seed)  # noqa: S311 - a workload, not a secret
        ids = TokenSource(rng, self.vocab_size)
        of_input, of_output = self._ratios()
        prefixes = [ids.draw(self.num_prefix_tokens) for _ in range(self.num_prefixes)]
        return [
            BenchRequest(
                prefixes[index % self.num_prefixes] + ids.draw(_length(rng, self.num_input_tokens, of_input)),
                _length(rng, self.num_output_tokens, of_output),
            )
            for index in range(self.num_prompts)
        ]

    def _ratios(self) -> tuple[float, float]:
        return self.range_ratio if isinstance(self.range_ratio, tuple) else (self.range_ratio, self.range_ratio)

    def _check(self) -> None:
        if not all(0 <= ratio < 1 for ratio in self._ratios()):
            raise BenchError(f"--random-range-ratio {self.range_ratio}: must lie in [0, 1)", exit_code=2)
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise BenchError(f"--vocab-size {self.vocab_size}: must be above {FIRST_TOKEN_ID}", exit_code=2)
        if self.num_prompts > 0 and self.num_prefix_tokens + self.num_input_tokens < 1:
            raise BenchError("--random-input-len 0: a prompt needs at least one token", exit_code=2)
        check_total(self.num_prompts * (self.num_prefix_tokens + self.num_input_tokens))


def _length(rng: random.Random, mean: int, ratio: float) -> int:
    if not ratio:
        return mean
    return rng.randint(max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio))))


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Random token ids of a vocabulary."""

    rng: random.Random
    vocab_size: int
    _ids: range = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", range(FIRST_TOKEN_ID, self.vocab_size))

    def draw(self, num_tokens: int) -> list[int]:
        """`num_tokens` token ids, with repetitions."""
        return self.rng.choices(self._ids, k=num_tokens)


@dataclass(frozen=True, slots=True)
class SessionWriter:
    """Writes the messages of sessions: equal seeds and names give equal text."""

    seed: int
    to_text: ToText
    vocab_size: int

    def system(self, session: AgentSession) -> Message:
        """The message that sessions with the same prefix begin with."""
        name = f"{session.tenant} {session.prefix}"
        return {"role": "system", "content": self._text(name, session.num_prefix_tokens)}

    def message(self, session: AgentSession, place: int) -> Message:
        """The message that a turn adds. A tool's result is one of the user: not every template has tools."""
        turn = session.turns[place]
        return {"role": "user", "content": self._text(f"{session.id} {place}", turn.num_new_tokens)}

    def _text(self, name: str, num_tokens: int) -> str:
        rng = random.Random(f"{self.seed} {name}")  # noqa: S311 - a workload, not a secret
        return self.to_text(TokenSource(rng, self.vocab_size).draw(num_tokens))


@dataclass(frozen=True, slots=True)
class WrittenSession:
    """A session, and what writes its text."""

    session: AgentSession
    writer: SessionWriter


def check_total(num_tokens: int) -> None:
    """Raises BenchError if prompts of `num_tokens` in total would not fit into memory."""
    if num_tokens > MAX_PROMPT_TOKENS:
        reason = f"{num_tokens} prompt tokens together, {MAX_PROMPT_TOKENS} at most"
        raise BenchError(f"--num-prompts: {reason}", exit_code=2)
