"""Beam search equals transformers', offline and over HTTP; a client that leaves takes its beams along."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import transformers

from llmstack_llm import LLM, BeamSearchParams, SamplingParams

VOCAB_SIZE, EOS, OTHER_END = 13, 3, 7
TINY: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.35, "bos_token_id": 0, "eos_token_id": EOS}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **TINY),
    "llama": transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, **TINY,
    ),
}  # fmt: skip
SEEDS = range(2)
ROOMY = {"num_kv_blocks": 256, "block_size": 4}
ENGINES = [
    ROOMY,
    ROOMY | {"async_scheduling": True},
    ROOMY | {"enable_prefix_caching": False, "max_num_seqs": 3, "num_kv_blocks": 48},
]


@pytest.fixture(scope="module", params=[(name, seed) for name in CONFIGS for seed in SEEDS], ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    name, seed = request.param
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    folder = tmp_path_factory.mktemp(name)
    made.save_pretrained(folder)
    return made, folder


def theirs(model: Any, prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[tuple[list[int], float]]:
    """Generated tokens up to and with the one that ends them, and the score of each sequence."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=max_tokens, pad_token_id=EOS, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    endings = options.get("eos_token_id", [EOS])
    sequences = []
    for tokens, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((place for place, token_id in enumerate(tokens) if token_id in endings), len(tokens) - 1)
        sequences.append((tokens[: end + 1], score))
    return sequences


def cases(seed: int) -> Iterator[tuple[int, int, float, bool | str]]:
    """Width, length, length penalty, early stopping."""
    rng = random.Random(seed)
    for width in (2, 3, 4):
        for early_stopping in (False, True, "never"):
            yield width, rng.choice([1, 2, 8, 16]), rng.choice([1.0, 0.0, 2.0, -0.5]), early_stopping


@pytest.mark.parametrize("engine", ENGINES, ids=["plain", "async", "few-rows-without-cache"])
def test_beams_and_scores_are_those_of_transformers(model: tuple[Any, Path], engine: dict[str, Any]) -> None:
    reference, folder = model
    num_ended = 0
    with LLM(str(folder), skip_tokenizer_init=True, **engine) as llm:
        for number, (width, max_tokens, length_penalty, early_stopping) in enumerate(cases(ENGINES.index(engine))):
            prompts = [[(7 * number + 5 * i + k) % VOCAB_SIZE for k in range(1 + 4 * i)] for i in range(2)]
            params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping)
            for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
                expected = theirs(
                    reference, prompt, width, max_tokens, length_penalty=length_penalty, early_stopping=early_stopping
                )
                tokens = [sequence.tokens[len(prompt) :] for sequence in output.sequences]
                assert tokens == [found for found, _ in expected]
                scores = [
                    one.cum_logprob / len(t) ** length_penalty for one, t in zip(output.sequences, tokens, strict=True)
                ]
                assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
                num_ended += sum(sequence.finish_reason == "stop" for sequence in output.sequences)
    assert num_ended, "no sequence came to its end, so nothing was said about ending"


def test_stop_token_ids_end_beams_as_further_ends_of_sequence(model: tuple[Any, Path]) -> None:
    reference, folder = model
    prompt = [1, 2, 3, 4, 5]
    with LLM(str(folder), skip_tokenizer_init=True, **ROOMY) as llm:
        params = SamplingParams(n=3, use_beam_search=True, max_tokens=12, stop_token_ids=[OTHER_END])
        [output] = llm.generate([prompt], params, use_tqdm=False)
        expected = theirs(reference, prompt, 3, 12, eos_token_id=[EOS, OTHER_END])
        assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in expected]
        for completion in output.outputs:
            assert completion.stop_reason == (OTHER_END if completion.token_ids[-1] == OTHER_END else None)


BODY: dict[str, Any] = {"max_tokens": 12, "n": 3, "use_beam_search": True, "temperature": 0}


def test_equal_prompts_get_equal_beams_over_http(demo_server: Any) -> None:
    prompts = ["Once upon a time", "Once upon a time"]
    status, answer, _ = demo_server.post("/v1/completions", BODY | {"prompt": prompts, "logprobs": 1})
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[:3] == texts[3:]
    assert len(set(texts[:3])) == 3
    means = [
        sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
        for choice in answer["choices"][:3]
    ]
    assert means == sorted(means, reverse=True)
    num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_a_chat_is_answered_by_beams(demo_server: Any) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "Tell me about a cat."}], "logprobs": True}
    status, answer, _ = demo_server.post("/v1/chat/completions", body)
    assert status == 200, answer
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


def test_a_client_that_leaves_ends_all_its_beams(demo_server: Any) -> None:
    body = json.dumps(BODY | {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "early_stopping": "never"})
    address = urlsplit(demo_server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        demo_server.wait_for(lambda: demo_server.metric("vllm:num_requests_running") == 3, "three running beams")
    demo_server.wait_for(lambda: demo_server.metric("vllm:num_requests_running") == 0, "end of the beams")
