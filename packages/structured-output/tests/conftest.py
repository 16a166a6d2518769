"""What the tests of this package share."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmstack_structured_output import GrammarCompiler
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer


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
