"""Encoders with decoders through the whole engine: prompts go to the encoder, answers are those of transformers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoder_models import CASES, NGRAM, PROMPTS, QUICK, open_engine, write_checkpoint, write_translator

from llmstack_llm import LLM, SamplingParams
from llmstack_types import InvalidRequestError

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def continued(model: Any, prompts: list[list[int]], first: tuple[int, ...] = ()) -> list[list[int]]:
    """What transformers writes behind the decoder's first tokens, the end of an answer left out of sight."""
    found = []
    for prompt in prompts:
        tokens = [model.config.decoder_start_token_id, *first]
        start = len(tokens)
        with torch.no_grad():
            encoded = model.get_encoder()(torch.tensor([prompt]))
            for _ in range(NUM_TOKENS):
                output = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens]), use_cache=False)
                tokens.append(int(output.logits[0, -1].argmax()))
        found.append(tokens[start:])
    return found


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES
])  # fmt: skip
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_checkpoint(folder, request.param)


def written(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 7}, marks=pytest.mark.full),
        {"num_kv_blocks": 5, "block_size": 16},
        pytest.param({"speculative_config": NGRAM}, marks=pytest.mark.full),
    ],
    ids=["together", "in tiny steps", "preempted", "with drafts"],
)
def test_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, Any], options: dict[str, Any]) -> None:
    folder, model = checkpoint
    expected = continued(model, PROMPTS)
    with open_engine(folder, **options) as llm:
        assert written(llm, PROMPTS) == expected
        assert written(llm, PROMPTS) == expected  # by items that are encoded already
        assert [written(llm, [prompt])[0] for prompt in PROMPTS] == expected


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A checkpoint with a tokenizer that ends each prompt, and a chat template."""
    folder = tmp_path_factory.mktemp("translator")
    return folder, *write_translator(folder)


def ask(server: Any, prompt: str, **fields: Any) -> Any:
    more = {"ignore_eos": True, "return_token_ids": True, **fields}
    return server.client.completions.create(
        model="m", prompt=prompt, temperature=0, max_tokens=NUM_TOKENS, extra_body=more
    )


def test_prompts_over_http_alone_together_and_after_a_kill(
    translator: tuple[Path, Any, Any], serve: Callable[..., Any]
) -> None:
    folder, model, backend = translator
    texts = ["Hello", "How are you?", "x y z " * 5, "Hello"]
    ids = [backend.encode(text).ids for text in texts]
    expected = continued(model, ids)
    with serve(str(folder), "--dtype", "float32", "--served-model-name", "m") as server:
        found = ask(server, texts[1])
        assert found.choices[0].token_ids == expected[1]
        assert found.usage.prompt_tokens == len(ids[1]) + 1  # the decoder's first token
        french = backend.token_to_id("<fr>")
        forced = ask(server, texts[1], forced_bos_token_id=french)
        assert forced.choices[0].token_ids == continued(model, ids[1:2], (french,))[0] != expected[1]
        chat = server.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": texts[0]}], temperature=0, max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        assert chat.choices[0].token_ids == expected[0]
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(ask, server, text) for text in texts * 4]
            server.wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, "the first tokens")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert [one.result().choices[0].token_ids for one in waiting] == expected * 4


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"echo": True}, "unsupported_parameter"),
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "unsupported_parameter"),
        ({"forced_bos_token_id": 100_000}, "invalid_value"),
        ({"prompt": [5] * 65}, "context_length_exceeded"),
        ({"prompt": "x" * 10_000}, "context_length_exceeded"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], code: str, translator_server: Any) -> None:
    status, answer, _ = translator_server.post("/v1/completions", {"model": "m", "prompt": "a", **fields})
    assert (status, answer["error"]["code"]) == (400, code), answer


@pytest.fixture(scope="module")
def translator_server(translator: tuple[Path, Any, Any], serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(translator[0]), "--dtype", "float32", "--served-model-name", "m") as server:
        yield server


def test_an_encoder_prompt_is_the_prompt_and_forks_share_what_is_encoded(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    expected = continued(model, PROMPTS[3:4])[0]
    with open_engine(folder) as llm:
        (output,) = llm.generate([{"encoder_prompt": {"prompt_token_ids": PROMPTS[3]}}], GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
        first, second = (
            [list(one.token_ids) for one in llm.generate([{"prompt_token_ids": PROMPTS[3]}], params)[0].outputs]
            for _ in range(2)
        )
        assert first == second
        assert len({tuple(tokens) for tokens in first}) == 3
        with pytest.raises(InvalidRequestError, match="forced_bos_token_id"):
            llm.generate([{"encoder_prompt": [5], "decoder_prompt": [3]}], GREEDY, use_tqdm=False)
