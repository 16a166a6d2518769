"""An engine core lives through random, cut, oversized and odd frames; streams beside them do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tool_modules import load_tool

from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import encode_in_parts
from llmstack_model_runner.testing import write_gpt2_checkpoint


@pytest.fixture(scope="module")
def fuzz() -> Any:
    return load_tool("fuzz_frames")


def test_frames_leave_the_engine_core_and_the_streams_of_others_as_they_are(fuzz: Any) -> None:
    assert fuzz.run(fuzz.config_for(None), 2_500, seed=11, vocab_size=97) == []


def test_the_same_holds_over_a_real_model_runner(fuzz: Any, tmp_path: Path) -> None:
    write_gpt2_checkpoint(tmp_path)
    assert fuzz.run(fuzz.config_for(str(tmp_path)), 600, seed=12, vocab_size=97) == []


def test_an_output_that_no_message_can_carry_ends_its_request_alone(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(message: Any, *given: Any) -> list[bytes]:
        if any(output.request_id == "good-0" and output.new_token_ids for output in getattr(message, "outputs", ())):
            raise CodecError("too large")
        return encode_in_parts(message, *given)

    monkeypatch.setattr("llmstack_engine_core.engine_core_proc.encode_in_parts", encode)
    loop = fuzz.FuzzedLoop(fuzz.config_for(None))
    loop.step()
    loop.finish()
    assert loop.ended == {"good-0": "error The output is too large to be sent.", "good-1": "length None"}
    assert loop.leftovers() == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_more_frames_with_other_seeds(fuzz: Any, tmp_path: Path, seed: int) -> None:
    write_gpt2_checkpoint(tmp_path, n_head=4 if seed % 2 else 2)  # PyTorch attends with heads of 8, native code with 16
    assert fuzz.run(fuzz.config_for(str(tmp_path)), 5_000, seed=seed, vocab_size=97) == []
