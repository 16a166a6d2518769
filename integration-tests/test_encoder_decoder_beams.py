"""Beams of encoders with decoders are those of transformers, with all that a model's own file says of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoder_models import CASES, NGRAM, PROMPTS, QUICK, open_engine, write_checkpoint, write_translator

from llmstack_llm import BeamSearchParams, SamplingParams
from llmstack_types import InvalidRequestError

FRENCH, END = 9, 2
BAD = (11, 40)
NUM_TOKENS = 12
ASKED = PROMPTS[:4]
Beams = list[tuple[list[int], float]]


def theirs(model: Any, prompt: list[int], width: int, **options: Any) -> Beams:
    """What the decoder writes behind its first token, up to the end, with the score of each beam."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
        return_dict_in_generate=True, output_scores=True, use_cache=False, **{"max_new_tokens": NUM_TOKENS, **options},
    )  # fmt: skip
    ends = model.generation_config.eos_token_id
    sequences = []
    for tokens, score in zip(found.sequences[:, 1:].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((place for place, token in enumerate(tokens) if token == ends), len(tokens) - 1)
        sequences.append((tokens[: end + 1], score))
    return sequences


def ours(output: Any, length_penalty: float) -> Beams:
    """The same of a request's output."""
    return [
        (list(one.token_ids), one.cumulative_logprob / len(one.token_ids) ** length_penalty) for one in output.outputs
    ]


def compare(found: Beams, expected: Beams) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int, int], Beams]:
    """What transformers found, by model, search and prompt: it takes longer than what is tested."""
    return {}


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES
])  # fmt: skip
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = write_checkpoint(folder, request.param)
    # The end is a token of the best beams: random weights hardly ever choose the usual one.
    tokens = [token for prompt in ASKED for token in theirs(model, prompt, 4)[0][0][4:7]]
    model.generation_config.eos_token_id = next(token for token in tokens if token not in BAD)
    model.generation_config.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 7}, marks=pytest.mark.full),
        pytest.param({"async_scheduling": True}, marks=pytest.mark.full),
        {"num_kv_blocks": 5, "block_size": 16, "max_num_seqs": 3},
        pytest.param({"speculative_config": NGRAM}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_beams_and_scores_are_those_of_transformers(
    checkpoint: tuple[Path, Any], options: dict[str, Any], known: dict[tuple[str, int, int], Beams]
) -> None:
    folder, model = checkpoint
    reasons = set()
    with open_engine(folder, **options) as llm:
        for width, length_penalty, early_stopping in ((4, 1.0, False), (3, 2.0, True), (2, 0.0, "never")):
            params = SamplingParams(
                n=width, use_beam_search=True, temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0,
                length_penalty=length_penalty, early_stopping=early_stopping,
            )  # fmt: skip
            outputs = llm.generate([{"prompt_token_ids": one} for one in ASKED], params, use_tqdm=False)
            for prompt, output in zip(ASKED, outputs, strict=True):
                key = (str(folder), width, len(prompt))
                if key not in known:
                    known[key] = theirs(
                        model, prompt, width, length_penalty=length_penalty, early_stopping=early_stopping
                    )
                compare(ours(output, length_penalty), known[key])
                reasons |= {one.finish_reason for one in output.outputs}
    assert reasons == {"stop", "length"}


FILES: list[dict[str, Any]] = [
    {"forced_bos_token_id": FRENCH, "forced_eos_token_id": END, "length_penalty": 2.0, "early_stopping": True},
    {"no_repeat_ngram_size": 2, "min_length": 9, "length_penalty": 0.5},
    {"forced_bos_token_id": FRENCH, "min_length": 6, "repetition_penalty": 1.3, "max_new_tokens": 7},
    {"bad_words_ids": [[token] for token in BAD] + [[12, 13]], "min_new_tokens": 4, "early_stopping": "never"},
]


def write_file(folder: Path, model: Any, keys: dict[str, Any]) -> Any:
    """Gives the checkpoint a `generation_config.json` of its own; what transformers reads there."""
    config = type(model.generation_config)(
        **keys, num_beams=4, pad_token_id=model.config.pad_token_id, eos_token_id=model.generation_config.eos_token_id,
        decoder_start_token_id=model.config.decoder_start_token_id,
    )  # fmt: skip
    config.save_pretrained(folder)
    return type(config).from_pretrained(folder)


@pytest.mark.parametrize("keys", FILES, ids=str)
def test_what_the_models_own_file_says_of_beams_counts(
    checkpoint: tuple[Path, Any], tmp_path: Path, keys: dict[str, Any]
) -> None:
    shutil.copytree(checkpoint[0], tmp_path, dirs_exist_ok=True)
    model = checkpoint[1]
    config = write_file(tmp_path, model, keys)
    length_penalty, forced = keys.get("length_penalty", 1.0), keys.get("forced_bos_token_id")
    first = () if forced is None else (forced,)
    num_tokens = keys.get("max_new_tokens", NUM_TOKENS)
    params = BeamSearchParams(
        4, num_tokens, length_penalty=length_penalty, early_stopping=keys.get("early_stopping", False)
    )
    with open_engine(tmp_path) as llm:
        outputs = llm.beam_search([{"prompt_token_ids": one} for one in ASKED], params)
    for prompt, output in zip(ASKED, outputs, strict=True):
        found = [
            ([*first, *one.tokens[1 + len(first) :]], one.cum_logprob / (len(one.tokens) - 1) ** length_penalty)
            for one in output.sequences
        ]
        compare(found, theirs(model, prompt, 4, generation_config=config, max_new_tokens=num_tokens + len(first)))


@pytest.mark.parametrize("key", ["diversity_penalty", "encoder_no_repeat_ngram_size", "suppress_tokens"])
def test_a_file_with_what_beams_do_not_apply_is_refused_by_name(key: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "t5")
    (tmp_path / "generation_config.json").write_text(json.dumps({key: [5] if "tokens" in key else 2}))
    with open_engine(tmp_path) as llm:
        with pytest.raises(InvalidRequestError, match=key) as caught:
            llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], BeamSearchParams(2, 4))
        assert (caught.value.param, caught.value.code) == ("use_beam_search", "unsupported_parameter")
        assert llm.generate([{"prompt_token_ids": PROMPTS[1]}], SamplingParams(temperature=0, max_tokens=2))


def test_beams_over_http_alone_together_and_after_a_kill(tmp_path: Path, serve: Callable[..., Any]) -> None:
    model, backend = write_translator(tmp_path)
    french, end = backend.token_to_id("<fr>"), backend.token_to_id("</s>")
    keys = {"length_penalty": 2.0, "no_repeat_ngram_size": 3, "early_stopping": True, "forced_eos_token_id": end}
    config = write_file(tmp_path, model, keys)
    texts = ["Hello", "How are you?", "x y z " * 5]

    def beams(text: str, *first: int) -> list[list[int]]:
        forced = {"forced_bos_token_id": first[0]} if first else {}
        found = theirs(
            model, backend.encode(text).ids, 3, generation_config=config,
            max_new_tokens=NUM_TOKENS + len(first), **forced,
        )  # fmt: skip
        return [tokens[len(first) :] for tokens, _ in found]

    with serve(str(tmp_path), "--dtype", "float32", "--served-model-name", "m") as server:

        def ask(text: str, **fields: Any) -> list[list[int]]:
            answer = server.client.completions.create(
                model="m", prompt=text, n=3, temperature=0, max_tokens=NUM_TOKENS,
                extra_body={"use_beam_search": True, "return_token_ids": True, **fields},
            )  # fmt: skip
            assert {one.finish_reason for one in answer.choices} <= {"stop", "length"}
            return [one.token_ids for one in answer.choices]

        expected = [beams(text) for text in texts]
        assert ask(texts[1]) == expected[1]
        assert ask(texts[1], forced_bos_token_id=french) == beams(texts[1], french) != expected[1]
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(ask, text) for text in texts * 4]
            server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0, "the first beams")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert [one.result() for one in waiting] == expected * 4
