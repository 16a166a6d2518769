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
import transformers
from picture_model import make_tokenizer
from tokenizers import processors

from llmstack_llm import LLM, SamplingParams
from llmstack_types import InvalidRequestError

VOCAB_SIZE, NUM_TOKENS = 97, 16
PROMPTS = [[(7 * i + 3) % (VOCAB_SIZE - 4) + 4 for i in range(9 * n)] + [n + 5, 2] for n in range(6)]
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    "relative_attention_max_distance": 20, "relative_attention_num_buckets": 8,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "forced_bos_token_id": None, "init_std": 0.3, "activation_function": "gelu",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5 1.1": ("T5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "bart, scaled": ("BartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "mbart": ("MBartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", _BART | {"pad_token_id": 0, "decoder_start_token_id": 0}),
    "m2m 100": ("M2M100ForConditionalGeneration", _BART | {"scale_embedding": True}),
    "marian": ("MarianMTModel", _BART | {"pad_token_id": 96, "decoder_start_token_id": 96, "scale_embedding": True}),
    "blenderbot": ("BlenderbotForConditionalGeneration", _BART),
    "plbart": ("PLBartForConditionalGeneration", _BART),
}
QUICK = ("t5", "m2m 100")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def write_checkpoint(folder: Path, case: str, **changes: Any) -> Any:
    name, values = CASES[case]
    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**values | changes)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter_name.endswith("embed_positions.weight") or "Bart" in name:
                is_gain = parameter.ndim == 1 and parameter_name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(is_gain), std=0.1 if parameter.ndim == 1 else 0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model


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


def open_engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=48, **options)


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
    tokenizer = make_tokenizer(("<pad>", "<s>", "</s>", "<fr>"), {})
    backend = tokenizer.backend_tokenizer
    end = ("</s>", backend.token_to_id("</s>"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}</s>"
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(tokenizer),
        "pad_token_id": backend.token_to_id("<pad>"),
        "decoder_start_token_id": end[1],
    }
    ends = {"eos_token_id": end[1], "bos_token_id": backend.token_to_id("<s>")}
    return folder, write_checkpoint(folder, "mbart", **sizes, **ends), backend


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
        ({"use_beam_search": True, "n": 2}, "unsupported_parameter"),
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
