"""Embeddings through the whole engine and over HTTP equal the pooled hidden states of transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import real_models
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny

from llmstack_llm import LLM, EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, SamplingParams
from llmstack_llm.outputs.stats import IterationStats
from llmstack_llm.testing import byte_tokenizer
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import EngineReady, InvalidRequestError, PoolingType, SchedulerStats
from llmstack_types.vocabulary import ModelImpl

SHARED_PREFIX = [(7 * i + 3) % 97 for i in range(20)]
PROMPTS = [SHARED_PREFIX + [(11 * i + j) % 97 for j in range(1 + 5 * i)] for i in range(6)]
TEXTS = ["a short one", "two words", "something much longer, for the sake of the batch", "a short one"]
BERT = tiny.BERT | {"vocab_size": 300}
LLAMA = BERT | {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 128}
GPT2 = tiny.GPT2 | {"vocab_size": 300, "n_positions": 128}
DECODERS = {"LlamaForCausalLM": ("LlamaConfig", LLAMA), "GPT2LMHeadModel": ("GPT2Config", GPT2)}


def save(folder: Path, name: str, config_name: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config_name)(**values)).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


KINDS = (PoolingType.CLS, PoolingType.MEAN, PoolingType.LAST)


def pooled(model: Any, token_ids: list[int], kind: PoolingType) -> torch.Tensor:
    """What is expected, of length 1."""
    with torch.inference_mode():
        hidden = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
    vector = {PoolingType.CLS: hidden[0], PoolingType.MEAN: hidden.mean(0), PoolingType.LAST: hidden[-1]}[kind]
    return torch.nn.functional.normalize(vector, dim=0)


def assert_close(numbers: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(list(numbers)), expected, rtol=0, atol=1e-5)


class Preemptions:
    """Counts them."""

    def __init__(self) -> None:
        self.num_preemptions = 0

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """Nothing to keep."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Keeps the counter."""
        if scheduler_stats is not None:
            self.num_preemptions = scheduler_stats.num_preemptions


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model in the files of sentence-transformers, as MiniLM has them: mean pooling, then length 1."""
    folder = tmp_path_factory.mktemp("minilm")
    model = save(folder, "BertModel", "BertConfig", BERT)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60}))
    return folder, model


@pytest.fixture(scope="module")
def minilm_server(serve: Callable[..., Any], minilm: tuple[Path, Any]) -> Iterator[Any]:
    with serve(str(minilm[0]), "--served-model-name", "minilm", "--max-num-batched-tokens", "16") as server:
        yield server


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_decoders_vectors_equal_transformers_in_chunks_with_hits_and_preemption(
    architecture: str, tmp_path: Path
) -> None:
    model = save(tmp_path, architecture, *DECODERS[architecture])
    record = str(tmp_path / "steps")
    options: dict[str, Any] = {"num_kv_blocks": 20, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4}
    args = EngineArgs(str(tmp_path), device="cpu", max_model_len=64, record_steps=record, **options)
    counter = Preemptions()
    engine = LLMEngine.from_engine_args(args, stat_loggers=[counter])
    torch.set_num_threads(1)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"c{index}", prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        for kind in KINDS:
            engine.add_pooling_request(f"{kind} {index}", prompt, PoolingParams(kind))
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    engine.shutdown()
    assert counter.num_preemptions > 0
    for index, prompt in enumerate(PROMPTS):
        assert len(found[f"c{index}"].outputs[0].token_ids) == 12
        for kind in KINDS:
            output = found[f"{kind} {index}"]
            assert isinstance(output, PoolingRequestOutput)
            assert_close(output.outputs.data, pooled(model, prompt, kind))
            assert output.num_cached_tokens == 0 or kind is PoolingType.LAST
    assert any(found[f"last {index}"].num_cached_tokens for index in range(len(PROMPTS)))
    assert verify(read_step_log(record)).num_requests == 4 * len(PROMPTS)


def test_an_encoders_vectors_are_pooled_as_its_folder_says(minilm: tuple[Path, Any]) -> None:
    folder, model = minilm
    with LLM(str(folder), device="cpu") as llm:
        torch.set_num_threads(1)
        token_ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
        outputs = llm.embed(TEXTS, use_tqdm=False)
        for ids, output in zip(token_ids, outputs, strict=True):
            assert_close(output.outputs.embedding, pooled(model, ids, PoolingType.MEAN))
        alone = llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding
        assert_close(alone, torch.tensor(outputs[0].outputs.embedding))
        short = llm.embed(TEXTS[0], PoolingParams(dimensions=5), use_tqdm=False)[0].outputs.embedding
        assert_close(short, torch.nn.functional.normalize(torch.tensor(alone[:5]), dim=0))
        with pytest.raises(InvalidRequestError, match="only computes embeddings"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="60 tokens"):
            llm.embed("a" * 61, use_tqdm=False)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("model_impl", ["llmstack", "transformers"])
def test_trained_vectors_are_those_of_transformers(model_impl: ModelImpl) -> None:
    """All-MiniLM-L6-v2, whose folder names mean pooling, length 1 and at most 256 tokens."""
    folder = real_models.minilm_folder()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        *TEXTS,
        "Größe, café, 日本語 😀",
        "A cat sits on the mat. " * 30,
        "The feline is on the rug.",
        "GDP fell by 3 %.",
    ]
    with LLM(str(folder), device="cpu", dtype="float32", model_impl=model_impl) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        torch.set_num_threads(1)
        for text, output in zip(texts, outputs, strict=True):
            assert output.prompt_token_ids == tokenizer.encode(text)
            expected = pooled(model, output.prompt_token_ids, PoolingType.MEAN)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0.0, atol=1e-6)
        cat, *others = llm.score(
            "A cat sits on the mat.", ["The feline is on the rug.", "GDP fell by 3 %."], use_tqdm=False
        )
        assert cat.outputs.score > 0.5 > 0.1 > others[0].outputs.score


def test_a_step_that_is_too_short_for_an_encoders_prompts_is_made_longer_and_said(
    minilm: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = minilm
    with caplog.at_level(logging.WARNING), LLM(str(folder), device="cpu", max_num_batched_tokens=16) as llm:
        output = llm.embed("a" * 60, use_tqdm=False)[0]
    assert "max_num_batched_tokens raised from 16 to 60" in caplog.text
    assert_close(output.outputs.embedding, pooled(model, output.prompt_token_ids, PoolingType.MEAN))


def test_the_openai_client_gets_the_vectors_of_transformers(minilm_server: Any, minilm: tuple[Path, Any]) -> None:
    client, model = minilm_server.client, minilm[1]
    tokens = [minilm_server.post("/tokenize", {"prompt": text})[1]["tokens"] for text in TEXTS]
    answers = [
        client.embeddings.create(model="minilm", input=TEXTS),  # base64 is what the client asks for by itself
        client.embeddings.create(model="minilm", input=tokens, encoding_format="float"),
    ]
    for answer in answers:
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        for one, ids in zip(answer.data, tokens, strict=True):
            assert_close(one.embedding, pooled(model, ids, PoolingType.MEAN))
    for one, other in zip(*(answer.data for answer in answers), strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_what_an_embedding_model_cannot_do_is_a_400(minilm_server: Any) -> None:
    client = minilm_server.client
    with pytest.raises(openai.BadRequestError, match="does not support Completions API"):
        client.completions.create(model="minilm", prompt="a")
    with pytest.raises(openai.BadRequestError, match="Chat Completions API"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "a"}], stream=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 60 tokens"):
        client.embeddings.create(model="minilm", input="a" * 61)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="minilm", input="a", dimensions=33)
    assert minilm_server.get_json("/server_info")["engine"]["is_generative"] is False


def test_a_served_language_model_embeds_beside_its_streams(demo_server: Any) -> None:
    client = demo_server.client
    model = client.models.list().data[0].id
    expected = client.embeddings.create(model=model, input="Once upon a time").data[0].embedding
    assert sum(number * number for number in expected) == pytest.approx(1.0, abs=1e-5)
    with ThreadPoolExecutor(8) as pool:
        completions = [pool.submit(client.completions.create, model=model, prompt="Once", max_tokens=40, temperature=0)]
        vectors = [pool.submit(client.embeddings.create, model=model, input="Once upon a time") for _ in range(12)]
        for vector in vectors:
            assert vector.result().data[0].embedding == pytest.approx(expected, abs=1e-4)
        assert completions[0].result().usage.completion_tokens > 0
