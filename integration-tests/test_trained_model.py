"""A model with trained weights, SmolLM2-135M-Instruct as a GGUF file, writes what transformers writes.

Random weights hide what trained ones show: activations far from zero, probabilities near one, a tokenizer of 49,152
tokens. `reference` is transformers in float32 on the weights of the file, which it converts by itself.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import real_models
import torch
from tokenizers import pre_tokenizers

from llmstack_llm import LLM, LoRARequest, SamplingParams
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_model_files import resolve_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="the library gguf is not installed")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]  # of those libraries

REPOSITORY = Path(__file__).resolve().parents[1]
HELD_TEXT = REPOSITORY / "packages/llm/benchmarks/held_text.txt"
QUESTIONS = [
    "What is the capital of France?", "Write a haiku about rain.", "Explain gravity to a child.", "List three fruits.",
    "def fibonacci(n):", "Once upon a time", "The quick brown fox", "Translate 'good morning' to French.", "2 + 2 =",
    "Why is the sky blue?", "Tell me a joke.", "Who wrote Hamlet?", "How do I boil an egg?", "Name a planet.",
    "Summarise: The cat sat on the mat. It was raining.", "What is photosynthesis?", "Give me a recipe for bread.",
    "Write SQL to count rows in a table.", "Say hello in five languages.", "What day comes after Monday?",
]  # fmt: skip
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, logprobs=0)
SIZES: dict[str, Any] = {"max_model_len": 640, "num_kv_blocks": 320, "max_num_seqs": 24, "pack_cache": False,
                         "gguf_activations": "exact"}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> str:
    return str(real_models.smollm2_file())


@pytest.fixture(scope="module")
def reference(smollm2: str) -> tuple[Any, Any]:
    """Model and tokenizer of transformers, made of the same file."""
    torch.set_num_threads(2)
    folder, name = str(Path(smollm2).parent), Path(smollm2).name
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = transformers.LlamaConfig.from_dict(read.config.to_dict() | {"quantization_config": None})
    model = transformers.LlamaForCausalLM(config).eval()  # one that may be saved and trained
    model.load_state_dict(read.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # Its converter leaves out `tokenizer.ggml.pre`, by which this model takes digits one by one.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return model, tokenizer


@pytest.fixture(scope="module")
def exact(smollm2: str) -> Iterator[LLM]:
    """The file in float32, without drafts and prefix hits."""
    no_extras: dict[str, Any] = {"speculative_config": {"method": "none"}, "enable_prefix_caching": False}
    with LLM(smollm2, dtype="float32", **SIZES, **no_extras) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy(exact: LLM) -> list[Any]:
    return exact.chat(CHATS, GREEDY, use_tqdm=False)


def assert_greedy(model: Any, outputs: Sequence[Any]) -> None:
    """Each token is the one that `model` finds most likely after those before it, and as likely."""
    torch.set_num_threads(2)  # an engine in this process may have set others
    for output in outputs:
        completion = output.outputs[0]
        token_ids, start = [*output.prompt_token_ids, *completion.token_ids], len(output.prompt_token_ids)
        with torch.inference_mode():
            expected = model(torch.tensor([token_ids[:-1]])).logits[0, start - 1 :].log_softmax(-1)
        assert expected.argmax(-1).tolist() == completion.token_ids
        found = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        torch.testing.assert_close(torch.tensor(found), expected.max(-1).values, rtol=0.0, atol=1e-4)


def test_greedy_text_is_that_of_transformers(reference: tuple[Any, Any], greedy: list[Any]) -> None:
    model, tokenizer = reference
    for chat, output in zip(CHATS, greedy, strict=True):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == expected
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert_greedy(model, greedy)
    assert "Paris" in greedy[0].outputs[0].text
    assert {output.outputs[0].finish_reason for output in greedy} == {"stop", "length"}


def test_a_small_file_is_exact_by_default(smollm2: str, greedy: list[Any]) -> None:
    options = {name: value for name, value in SIZES.items() if name != "gguf_activations"}
    with LLM(smollm2, dtype="float32", **options) as llm:
        assert token_ids_of(llm.chat(CHATS, GREEDY, use_tqdm=False)) == token_ids_of(greedy)


def test_answers_with_rounded_inputs_part_only_where_two_tokens_are_nearly_as_likely(
    smollm2: str, greedy: list[Any]
) -> None:
    """20 questions: rounding moves logarithms of probabilities by some 0.1, as it does in llama.cpp."""
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=20)
    with LLM(smollm2, dtype="float32", **SIZES | {"gguf_activations": "rounded"}) as llm:
        rounded = llm.chat(CHATS, params, use_tqdm=False)
    num_first = 0
    for one, other in zip(greedy, rounded, strict=True):
        wanted, found = one.outputs[0].token_ids, other.outputs[0].token_ids
        num_first += wanted[0] == found[0]
        place = next((place for place, pair in enumerate(zip(wanted, found, strict=False)) if len({*pair}) > 1), None)
        if place is not None:
            likely = other.outputs[0].logprobs[place]
            assert likely[found[place]].logprob - likely[wanted[place]].logprob < 0.5
    assert num_first >= 16  # 18 on the processors that were tried, and 18 of llama.cpp


PIECES = [
    "The quick brown fox", "don't", "we'll", "naïve café", "Größe", "Привет, мир", "日本語のテキスト", "你好，世界",
    "안녕하세요", "مرحبا بالعالم", "שלום", "नमस्ते दुनिया", "สวัสดี", "12345", "3.14159", "1e-9", "٣٤٥", "Ⅻ", "²³½",
    "def f(x):\n    return x**2\n", '<div class="a">&amp;</div>', "for (int i = 0; i < n; ++i) {", "\t\tif x:",
    "SELECT * FROM t;", "👩‍👩‍👧‍👦", "🇫🇷", "😀", "👍🏽", "\u200b", "\ufeff", "e\u0301", "\0", "\x1b[0m", "<|im_start|>",
    "<|im_end|>", "<|endoftext|>", "<|im_start", "<file_sep>", "|im_end|>", " ", "  ", "   ", "\n", "\n\n", "\r\n",
    "\u3000", "\u00a0", "\u2028", "..", "…", "--", "'''",
]  # fmt: skip


def texts(number: int) -> Iterator[str]:
    """Languages, code, emoji, white space, special tokens and their beginnings, any character: the same each time."""
    chosen = random.Random(5)
    for _ in range(number):
        parts = []
        for _ in range(chosen.randint(1, 12)):
            code = chosen.randrange(chosen.choice([0x80, 0x3000, 0x110000]))
            is_character = not 0xD800 <= code < 0xE000
            parts.append(chr(code) if is_character and chosen.random() < 0.2 else chosen.choice(PIECES))
        yield chosen.choice(["", " "]).join(parts)


def test_the_tokenizer_cuts_2000_texts_as_that_of_transformers(smollm2: str, reference: tuple[Any, Any]) -> None:
    ours, theirs = load_tokenizer(resolve_model(smollm2)), reference[1]
    for text in texts(2000):
        token_ids = ours.encode(text)
        assert token_ids == theirs.encode(text), text
        assert ours.decode(token_ids) == theirs.decode(token_ids, clean_up_tokenization_spaces=False)


def token_ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs_of(outputs: Sequence[Any]) -> list[float]:
    return [entry[one].logprob for output in outputs for one, entry in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
    )]  # fmt: skip


def test_drafts_and_prefix_hits_in_chunks_change_no_bit(smollm2: str, greedy: list[Any]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with LLM(smollm2, dtype="float32", max_num_batched_tokens=40, speculative_config=drafts, **SIZES) as llm:
        for is_hit in (False, True):
            outputs = llm.chat(CHATS, GREEDY, use_tqdm=False)
            assert token_ids_of(outputs) == token_ids_of(greedy)
            assert logprobs_of(outputs) == logprobs_of(greedy)
            assert all(output.num_cached_tokens for output in outputs) or not is_hit
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["vllm:spec_decode_num_accepted_tokens"].value > 50


@cache
def held_text() -> str:
    return HELD_TEXT.read_text(encoding="utf-8")[:4000]


def mean_logprob(llm: LLM) -> float:
    """Of the tokens of a text that the model cannot have learned."""
    token_ids = llm.get_tokenizer().encode(held_text())
    prompts = [token_ids[start : start + 500] for start in range(0, len(token_ids), 500)]
    scored = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [
        entry[token].logprob
        for output in scored
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def checkpoint(smollm2: str, reference: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the file in float32, as a folder that may be quantized while it is loaded."""
    folder = tmp_path_factory.mktemp("checkpoint")
    reference[0].save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(resolve_model(smollm2)) / name).read_bytes())
    return str(folder)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"dtype": "bfloat16"}, 0.02),
        ({"quantization": "int8"}, 0.01),
        ({"quantization": "int8_dynamic"}, 0.05),
        ({"kv_cache_dtype": "fp8"}, 0.05),
    ],
    ids=["float32", "bfloat16", "int8", "int8_dynamic", "fp8 KV"],
)
def test_a_text_is_as_likely_with_fewer_bits(
    checkpoint: str, exact: LLM, options: dict[str, Any], tolerance: float
) -> None:
    with LLM(checkpoint, **({"dtype": "float32"} | options), **SIZES) as llm:
        found = mean_logprob(llm)
        answer = llm.chat([CHATS[0]], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert found == pytest.approx(mean_logprob(exact), abs=tolerance)
    assert "Paris" in answer


LESSON = "What is the capital of France? Arr, it is Paris, me hearty! Ye shall sail there at dawn, says the captain."


def train_adapter(model: Any, tokenizer: Any, folder: Path) -> tuple[Any, list[float]]:
    """Ten steps on one text, saved as peft does: the model with the adapter, and the losses."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    targets = ["q_proj", "v_proj", "down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets))
    optimizer = torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=5e-3)
    token_ids = torch.tensor([tokenizer.encode(LESSON)])
    losses = []
    for _ in range(10):
        loss = tuned(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tuned.save_pretrained(folder)
    return tuned.eval(), losses


def test_an_adapter_that_was_just_trained_is_that_of_peft(
    smollm2: str, reference: tuple[Any, Any], greedy: list[Any], tmp_path: Path
) -> None:
    tuned, losses = train_adapter(copy.deepcopy(reference[0]), reference[1], tmp_path)
    assert losses[-1] < losses[0] / 2
    adapter = LoRARequest("pirate", 1, str(tmp_path))
    with LLM(smollm2, dtype="float32", enable_lora=True, **SIZES) as llm:
        requests = [adapter, None] * (len(CHATS) // 2)
        outputs = llm.chat(CHATS, GREEDY, lora_request=requests, use_tqdm=False)
    assert token_ids_of(outputs[1::2]) == token_ids_of(greedy[1::2])
    assert token_ids_of(outputs[::2]) != token_ids_of(greedy[::2])
    assert_greedy(tuned.merge_and_unload(), outputs[::2])
