"""Prompts as vectors: the text of the same prompt as token ids, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from llmstack_demo_model import model_path
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES
from llmstack_llm import LLM, SamplingParams
from llmstack_llm.offline.beam_search import BeamSearchParams
from llmstack_step_log import read_step_log
from llmstack_step_log.replay.verify import verify
from llmstack_types import Control

PROMPTS = ["Once upon a time there was a small fox who", "The old king said to the"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# Chunks of four tokens, and a cache so small that one request has to make room for the other.
OPTIONS: dict[str, Any] = {
    "enable_prompt_embeds": True, "max_num_batched_tokens": 4, "max_num_seqs": 2, "block_size": 8, "num_kv_blocks": 4,
    "max_model_len": 28, "generation_config": "vllm",
}  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "steps"


@pytest.fixture(scope="module")
def llm(log: Path) -> Iterator[LLM]:
    with LLM(str(model_path()), record_steps=str(log), **OPTIONS) as made:
        yield made


def table() -> Any:
    return load_file(Path(model_path()) / "model.safetensors")["transformer.wte.weight"]


def ids_of(llm: LLM) -> list[list[int]]:
    return [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]


def generate(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def vectors(token_ids: list[int]) -> dict[str, bytes]:
    return {"prompt_embeds": save({"prompt_embeds": table()[token_ids]})}


def mixed(token_ids: list[int], places: range) -> dict[str, Any]:
    """The prompt with vectors at some places, whose ids are not those of the tokens, and zeros at the other ones."""
    tensor = torch.zeros_like(table()[token_ids])
    tensor[places.start : places.stop] = table()[token_ids[places.start : places.stop]]
    is_token = [place not in places for place in range(len(token_ids))]
    ids = [one if is_known else 7 for one, is_known in zip(token_ids, is_token, strict=True)]
    return {"prompt_embeds": tensor, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}


def generate_rest(llm: LLM, prompt: dict[str, bytes], output_token_ids: list[int]) -> list[int]:
    """What an engine core computes that takes the place of one that died after these tokens."""
    processor, client = llm.llm_engine.input_processor, llm.llm_engine.client
    (request,) = processor.process_inputs("again", processor.admit(prompt, processor.check_params(GREEDY)))
    frame = CLIENT_MESSAGES.encode(replace(request, output_token_ids=tuple(output_token_ids)))
    client.add_request(CLIENT_MESSAGES.decode(frame)[1])
    found: list[int] = []
    while len(output_token_ids) + len(found) < 12:
        for output in client.get_outputs().outputs:
            found += output.new_token_ids
    return found


def test_vectors_of_tokens_give_the_tokens_that_these_give(llm: LLM, log: Path) -> None:
    ids = ids_of(llm)
    expected = generate(llm, ids)
    assert expected[0] != expected[1]
    given = [vectors(one) for one in ids]
    assert generate(llm, given) == expected
    two = SamplingParams(temperature=0.0, max_tokens=6, n=2)
    assert generate(llm, given[0], two) == [expected[0][:6]] * 2
    assert generate(llm, [vectors(ids[0][:1])]) == generate(llm, [ids[0][:1]])
    for places in (range(2), range(1, 4), range(len(ids[0]) - 1, len(ids[0]))):
        assert generate(llm, mixed(ids[0], places)) == expected[:1]
    assert generate_rest(llm, given[0], expected[0][:5]) == expected[0][5:]
    assert llm.llm_engine.client.call(Control.STATS).num_preemptions > 0
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    by_tokens, by_vectors = (llm.beam_search([prompt], beams)[0].sequences for prompt in (ids[0], given[0]))
    assert [one.tokens[-5:] for one in by_vectors] == [one.tokens[-5:] for one in by_tokens]
    llm.close()
    verify(read_step_log(log))
    assert given[0]["prompt_embeds"][-64:] not in log.read_bytes()


def test_equal_vectors_are_found_in_the_prefix_cache_and_others_are_not() -> None:
    options = {**OPTIONS, "num_kv_blocks": 64, "max_model_len": 64, "max_num_batched_tokens": 64}
    with LLM(str(model_path()), **options) as llm:
        ids = (ids_of(llm)[0] * 3)[:21]
        expected = generate(llm, ids)

        def num_cached(prompt: Any) -> int:
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert [*output.outputs[0].token_ids] == expected[0] or prompt is other
            return output.num_cached_tokens or 0

        other = vectors([*ids[:-1], ids[-1] + 1])
        assert [num_cached(prompt) for prompt in (vectors(ids), vectors(ids), ids, other)] == [0, 16, 16, 0]
        llm.sleep(1)
        llm.wake_up()
        assert [num_cached(vectors(ids)) for _ in range(2)] == [0, 16]
        # Tokens and vectors of the same prompt are other keys.
        assert [num_cached(mixed(ids, range(9, 21))) for _ in range(2)] == [0, 16]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_vectors_reach_the_ranks_that_embed(llm: LLM, ranks: dict[str, int]) -> None:
    with LLM(str(model_path()), **OPTIONS, **ranks) as shared:
        ids = ids_of(shared)
        assert generate(shared, [vectors(one) for one in ids]) == generate(shared, ids)
