"""What the tests of this package share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer

MAX_TOKENS = 400
ENDINGS = frozenset(b'"}],')


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token per byte; not to be changed."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def compiler(folder: Path) -> GrammarCompiler:
    """For that tokenizer."""
    return GrammarCompiler(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID])


def write(matcher: Matcher, rng: random.Random) -> str | None:
    """A text drawn at random, byte by byte, with a liking for ends; None where it finds none."""
    written: list[int] = []
    for _ in range(MAX_TOKENS):
        mask = matcher.mask()
        allowed = [token_id for token_id in range(EOS_TOKEN_ID + 1) if mask[token_id // 8] >> token_id % 8 & 1]
        assert allowed, f"nothing may follow {bytes(written)!r}: {matcher.error}"
        ends = [token_id for token_id in allowed if token_id in ENDINGS or token_id == EOS_TOKEN_ID]
        token_id = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        if token_id == EOS_TOKEN_ID:
            return bytes(written).decode()
        assert matcher.accept([token_id])
        written.append(token_id)
    return None


@pytest.fixture(scope="session")
def writer() -> Callable[[Matcher, random.Random], str | None]:
    """Writes a text at random."""
    return write
