"""Labels, scores and documents in order, through real processes, equal what transformers makes of the same texts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from llmstack_llm import LLM, TextPair
from llmstack_types import InvalidRequestError

WORDS = [
    "the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "park", "sun", "moon", "red", "blue", "big", "small",
    "and", "of", "to", "was",
]  # fmt: skip
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
TEXTS = ["The cat sat on the mat", "a dog ran", "the big red sun and the small blue moon", "cat"]
BERT: dict[str, Any] = tiny.BERT | {"vocab_size": 64}
LABELS = {0: "bad", 1: "fine", 2: "good"}


def word_pieces() -> Tokenizer:
    """A tokenizer of BERT's kind: lower case, pieces of words, special tokens around one text or two."""
    pieces = [*SPECIAL, *WORDS, *"abcdefghijklmnop", *(f"##{letter}" for letter in "abcdefghijklmnop")]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.enable_padding(length=32)  # as published folders of sentence-transformers have it
    tokenizer.enable_truncation(32)
    return tokenizer


def save(folder: Path, **values: Any) -> Any:
    """A random classifier in the files of a published one; in evaluation mode."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, **values)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    word_pieces().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return model


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("cross-encoder")
    return folder, save(folder, num_labels=1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("classifier")
    return folder, save(folder, id2label=LABELS, label2id={name: index for index, name in LABELS.items()})


@pytest.fixture(scope="module")
def reranker(serve: Callable[..., Any], cross_encoder: tuple[Path, Any]) -> Iterator[Any]:
    with serve(str(cross_encoder[0]), "--served-model-name", "reranker", "--runner", "pooling") as server:
        yield server


def logits(model: Any, *texts: str, max_tokens: int | None = None) -> torch.Tensor:
    """By transformers, of one text or a pair, whose tokens the library makes."""
    tokenizer = word_pieces()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_tokens is not None:
        tokenizer.enable_truncation(max_tokens)
    encoded = tokenizer.encode(*texts)
    with torch.inference_mode():
        found = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids]))
    result: torch.Tensor = found.logits[0]
    return result


def assert_close(numbers: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(numbers), expected, rtol=0, atol=1e-5)


def many_documents(count: int) -> list[str]:
    return [
        " ".join(WORDS[(7 * index + 3 * place) % len(WORDS)] for place in range(3 + index % 9))
        for index in range(count)
    ]


def test_offline_scores_and_labels_equal_those_of_transformers(
    cross_encoder: tuple[Path, Any], classifier: tuple[Path, Any]
) -> None:
    folder, model = cross_encoder
    with LLM(str(folder), device="cpu") as llm:
        torch.set_num_threads(1)
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            assert_close([output.outputs.score], torch.sigmoid(logits(model, TEXTS[0], text)))
        (cut,) = llm.score(TEXTS[2], TEXTS[0], truncate_prompt_tokens=9, use_tqdm=False)
        assert_close([cut.outputs.score], torch.sigmoid(logits(model, TEXTS[2], TEXTS[0], max_tokens=9)))
        pair = llm.encode(TextPair(TEXTS[0], TEXTS[1]), pooling_task="score", use_tqdm=False)[0]
        assert_close(pair.outputs.data.tolist(), torch.sigmoid(logits(model, TEXTS[0], TEXTS[1])))
    folder, model = classifier
    with LLM(str(folder), device="cpu") as llm:
        for text, labelled in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
            assert_close(labelled.outputs.probs, torch.softmax(logits(model, text), -1))
        with pytest.raises(InvalidRequestError, match="Score API: it tells 3 labels apart"):
            llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)


def test_documents_come_in_the_order_of_transformers(reranker: Any, cross_encoder: tuple[Path, Any]) -> None:
    documents = many_documents(100)
    body = {"model": "reranker", "query": TEXTS[0], "documents": documents, "top_n": 10}
    status, answer, _ = reranker.post("/v1/rerank", body)
    assert status == 200
    expected = torch.stack([torch.sigmoid(logits(cross_encoder[1], TEXTS[0], text))[0] for text in documents])
    for result in answer["results"]:
        assert_close(result["relevance_score"], expected[result["index"]])
        assert result["document"] == {"text": documents[result["index"]]}
    best = [result["relevance_score"] for result in answer["results"]]
    assert best == sorted(best, reverse=True)
    assert_close(best, expected.sort(descending=True).values[:10])
    assert answer["usage"]["total_tokens"] > 1000


def test_scores_come_over_http_as_offline(reranker: Any, cross_encoder: tuple[Path, Any]) -> None:
    status, answer, _ = reranker.post("/score", {"text_1": TEXTS[:2], "text_2": TEXTS[2:]})
    assert status == 200
    for one, first, second in zip(answer["data"], TEXTS[:2], TEXTS[2:], strict=True):
        assert_close([one["score"]], torch.sigmoid(logits(cross_encoder[1], first, second)))
    body = {"queries": TEXTS[0], "documents": TEXTS[1], "use_activation": False}
    assert_close([reranker.post("/score", body)[1]["data"][0]["score"]], logits(cross_encoder[1], TEXTS[0], TEXTS[1]))
    body = {"text_1": TEXTS[0], "text_2": "cat " * 100}
    status, answer, _ = reranker.post("/score", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert reranker.post("/score", body | {"truncate_prompt_tokens": -1})[1]["usage"]["total_tokens"] == 64


def test_a_model_that_scores_says_what_it_cannot(reranker: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support Completions API"):
        reranker.client.completions.create(model="reranker", prompt="a")
    assert len(reranker.client.embeddings.create(model="reranker", input="cat").data[0].embedding) == 32
    engine = reranker.get_json("/server_info")["engine"]
    assert (engine["is_generative"], engine["num_labels"]) == (False, 1)


def test_a_client_that_leaves_ends_its_documents(reranker: Any) -> None:
    body = json.dumps({"query": TEXTS[0], "documents": many_documents(2000)}).encode()
    address = urlsplit(reranker.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = "POST /rerank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head = f"{head}content-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        reranker.wait_for(lambda: reranker.get_json("/load")["server_load"] == 1, "request in flight")
    reranker.wait_for(lambda: reranker.get_json("/load")["server_load"] == 0, "end of the request")
    running = ("llmstack:num_requests_running", "llmstack:num_requests_waiting")
    reranker.wait_for(lambda: sum(map(reranker.metric, running)) == 0, "end of its documents")
    assert reranker.post("/score", {"text_1": "cat", "text_2": "dog"})[0] == 200


def test_labels_come_over_http_with_their_names(serve: Callable[..., Any], classifier: tuple[Path, Any]) -> None:
    folder, model = classifier
    with serve(str(folder), "--served-model-name", "classifier") as server:
        status, answer, _ = server.post("/classify", {"model": "classifier", "input": TEXTS})
        assert status == 200
        for one, text in zip(answer["data"], TEXTS, strict=True):
            expected = torch.softmax(logits(model, text), -1)
            assert_close(one["probs"], expected)
            assert (one["label"], one["num_classes"]) == (LABELS[int(expected.argmax())], 3)
        raw = server.post("/pooling", {"input": TEXTS[0], "use_activation": False})[1]["data"][0]["data"]
        assert_close(raw, logits(model, TEXTS[0]))


def test_a_language_model_scores_by_its_vectors(demo_server: Any) -> None:
    texts = ["Once upon a time", "a dog ran", "Once upon a night"]
    status, answer, _ = demo_server.post("/rerank", {"query": texts[0], "documents": texts})
    assert status == 200
    data = demo_server.client.embeddings.create(model=answer["model"], input=texts, encoding_format="float").data
    vectors = torch.tensor([one.embedding for one in data])
    assert answer["results"][0]["index"] == 0
    for result in answer["results"]:
        assert_close(result["relevance_score"], vectors[0] @ vectors[result["index"]])
    tokens = demo_server.post("/pooling", {"input": texts[0], "task": "token_embed"})[1]["data"][0]["data"]
    assert_close(tokens[-1], vectors[0])
    status, refused, _ = demo_server.post("/classify", {"input": "a"})
    assert status == 400
    assert "does not support Classification API" in refused["error"]["message"]


def test_a_use_that_a_model_is_not_made_for_ends_the_start_with_a_sentence(
    launch: Callable[..., Any], cross_encoder: tuple[Path, Any]
) -> None:
    server = launch(str(cross_encoder[0]), "--runner", "generate")
    assert server.process.wait(60) != 0
    assert "the model only pools, which runner, task or convert exclude" in server.log
    assert "Traceback" not in server.log
