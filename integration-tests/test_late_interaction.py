"""ColBERT over HTTP: `/rerank` sums up the best products of tokens, as the vectors of transformers give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from picture_model import make_tokenizer
from safetensors.torch import load_file, save_file

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.pooling.scoring import plan_scores
from llmstack_server.apis.pooling.scores import MAX_NUM_TOKEN_PAIRS, check_token_pairs
from llmstack_types import InvalidRequestError

QUERY = "What is it?"
DOCUMENTS = ["It is a picture.", "x", "Nothing at all, and some more of it."]


def write_colbert(folder: Path) -> tuple[Any, torch.Tensor, Any]:
    tokenizer = make_tokenizer(("[PAD]", "[CLS]", "[SEP]"), {})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    weight = torch.randn(8, 32)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(values))
    return model, weight, tokenizer.backend_tokenizer


def test_reranked_documents_have_the_scores_of_transformers(tmp_path: Path, serve: Callable[..., Any]) -> None:
    model, weight, tokenizer = write_colbert(tmp_path)

    def vectors(text: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden @ weight.T, dim=-1)

    query = vectors(QUERY)
    expected = [float((query @ vectors(one).T).max(1).values.sum()) for one in DOCUMENTS]
    with serve(str(tmp_path), "--dtype", "float32", "--served-model-name", "m") as server:
        status, answer, _ = server.post("/rerank", {"model": "m", "query": QUERY, "documents": DOCUMENTS})
        assert status == 200, answer
        found = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, rel=1e-5)
        order = [one["index"] for one in answer["results"]]
        assert order == sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])


def test_pairs_of_more_tokens_than_a_second_compares_are_refused() -> None:
    limits = AdmissionLimits(1 << 20, 97, embedding_size=8, is_generative=False, gives_token_vectors=True)
    plan = plan_scores(["q"], ["a", "b"], limits)
    longest = MAX_NUM_TOKEN_PAIRS // 1024
    check_token_pairs(plan, [512, longest, longest], "documents")
    with pytest.raises(InvalidRequestError, match=f"{MAX_NUM_TOKEN_PAIRS} at most"):
        check_token_pairs(plan, [512, longest, longest + 1], "documents")
