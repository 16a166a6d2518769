"""Labels of prompts and pairs, and vectors of tokens, equal those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers import tiny_configs as tiny
from model_runner_helpers.pool_prompts import pool_prompts

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.models.config_values import read_num_labels
from llmstack_model_runner.models.label_head import label_activation
from llmstack_types import ModelRunnerConfig, PoolingParams, PoolingTask, PoolingType

transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [46, 26, 43], [38, 32, 79, 50, 28, 84, 19]]
SIZES: dict[str, Any] = tiny.BERT
ROBERTA = SIZES | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "DistilBert": {
        "vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
        "initializer_range": 0.3,
    },
    "GPT2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3},
    "Llama": DECODER,
    "Mistral": DECODER,
    "Qwen2": DECODER,
    "Qwen3": DECODER | {"head_dim": 8},
}  # fmt: skip
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert")
DECODERS = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3")


def make(folder: Path, architecture: str, **changes: Any) -> Any:
    """A random model of transformers, saved; in evaluation mode."""
    family = architecture.removesuffix("Model").removesuffix("ForSequenceClassification")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family], **changes)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():  # biases of zero would hide one that is not loaded
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def start(folder: Path, **changes: Any) -> ModelRunner:
    config = ModelRunnerConfig(str(folder), block_size=4, max_model_len=32, max_num_seqs=8, device="cpu", **changes)
    runner = ModelRunner(config)
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(64)
    return runner


def params_of(architecture: str, task: PoolingTask = PoolingTask.CLASSIFY, **fields: Any) -> PoolingParams:
    is_encoder = architecture.startswith(ENCODERS)
    return PoolingParams(PoolingType.CLS if is_encoder else PoolingType.LAST, task=task, **fields)


def expected_logits(model: Any, prompt: list[int], types: list[int] | None = None) -> torch.Tensor:
    extra = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), **extra).logits[0]
    return logits


def assert_close(numbers: Any, expected: torch.Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(numbers, expected.float().detach().numpy(), atol=atol)


@pytest.mark.parametrize("num_labels", [1, 2, 5])
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_labels_equal_those_of_transformers_alone_and_among_others(
    family: str, num_labels: int, tmp_path: Path
) -> None:
    architecture = f"{family}ForSequenceClassification"
    model = make(tmp_path, architecture, num_labels=num_labels)
    runner = start(tmp_path)
    spec = runner.kv_cache_spec()
    assert (spec.num_labels, spec.is_generative, spec.is_causal) == (num_labels, False, family in DECODERS)
    params, bare = params_of(architecture), params_of(architecture, use_activation=False)
    together = pool_prompts(runner, {f"{index}": (prompt, params) for index, prompt in enumerate(PROMPTS)})
    for index, prompt in enumerate(PROMPTS):
        logits = expected_logits(model, prompt)
        probabilities = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, -1)
        assert_close(together[f"{index}"], probabilities)
        alone = pool_prompts(runner, {"alone": (prompt, params), "bare": (prompt, bare)})
        assert_close(alone["alone"], probabilities)
        assert_close(alone["bare"], logits)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoders_labels_do_not_depend_on_chunks(family: str, tmp_path: Path) -> None:
    architecture = f"{family}ForSequenceClassification"
    model = make(tmp_path, architecture, num_labels=3)
    runner = start(tmp_path)
    prompts = {f"{index}": (prompt, params_of(architecture)) for index, prompt in enumerate(PROMPTS)}
    for chunk_size in (1, 4):
        found = pool_prompts(runner, prompts, chunk_size=chunk_size)
        for index, prompt in enumerate(PROMPTS):
            assert_close(found[f"{index}"], torch.softmax(expected_logits(model, prompt), -1))


def test_the_second_text_of_a_pair_has_another_type(tmp_path: Path) -> None:
    model = make(tmp_path, "BertForSequenceClassification", num_labels=1)
    runner = start(tmp_path)
    prompt = PROMPTS[0]
    pair = params_of("Bert", use_activation=False, second_text_start=4)
    single = params_of("Bert", use_activation=False)
    found = pool_prompts(runner, {"pair": (prompt, pair), "single": (prompt, single), "other": (PROMPTS[1], pair)})
    logits = expected_logits(model, prompt, [0] * 4 + [1] * 6)
    assert_close(found["pair"], logits)
    assert_close(found["single"], expected_logits(model, prompt))
    assert_close(found["other"], expected_logits(model, PROMPTS[1]))
    assert abs(found["pair"] - found["single"]).max() > 1e-3
    again = pool_prompts(runner, {"single": (prompt, single)})  # in the row that a pair has left
    assert_close(again["single"], expected_logits(model, prompt))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_labels_of_narrow_types_are_near_those_of_float32(dtype: str, tmp_path: Path) -> None:
    model = make(tmp_path, "BertForSequenceClassification", num_labels=2)
    found = pool_prompts(start(tmp_path, dtype=dtype), {"p": (PROMPTS[0], params_of("Bert"))})
    assert_close(found["p"], torch.softmax(expected_logits(model, PROMPTS[0]), -1), atol=0.1)


def test_a_quantized_classifier_keeps_its_head(tmp_path: Path) -> None:
    model = make(tmp_path, "LlamaForSequenceClassification", num_labels=2)
    found = pool_prompts(start(tmp_path, quantization="int8"), {"p": (PROMPTS[0], params_of("Llama"))})
    assert_close(found["p"], torch.softmax(expected_logits(model, PROMPTS[0]), -1), atol=0.1)


@pytest.mark.parametrize("family", [*DECODERS, "DistilBert"])
def test_a_model_without_a_head_gives_vectors(family: str, tmp_path: Path) -> None:
    architecture = f"{family}Model"
    model = make(tmp_path, architecture)
    runner = start(tmp_path)
    assert (runner.kv_cache_spec().is_generative, runner.kv_cache_spec().num_labels) == (False, 0)
    mean = PoolingParams(PoolingType.MEAN, normalize=False, task=PoolingTask.EMBED)
    for prompt in PROMPTS:
        found = pool_prompts(runner, {"p": (prompt, mean)})
        with torch.inference_mode():
            assert_close(found["p"], model(torch.tensor([prompt])).last_hidden_state[0].mean(0))
    with pytest.raises(ValueError, match="failed at this request"):
        pool_prompts(runner, {"p": (PROMPTS[0], params_of(architecture))})


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_each_token_has_its_vector_whole_or_in_chunks(family: str, chunk_size: int | None, tmp_path: Path) -> None:
    model = make(tmp_path, f"{family}Model")
    tokens = PoolingParams(normalize=False, task=PoolingTask.TOKEN_EMBED)
    short = PoolingParams(normalize=True, dimensions=5, task=PoolingTask.TOKEN_EMBED)
    last = params_of(family, PoolingTask.EMBED, normalize=False)
    prompts = {"all": (PROMPTS[0], tokens), "short": (PROMPTS[2], short), "last": (PROMPTS[0], last)}
    found = pool_prompts(start(tmp_path), prompts, chunk_size=chunk_size)
    with torch.inference_mode():
        hidden, other = (model(torch.tensor([prompt])).last_hidden_state[0] for prompt in (PROMPTS[0], PROMPTS[2]))
    assert_close(found["all"].reshape(-1, 32), hidden)
    assert_close(found["short"].reshape(-1, 5), torch.nn.functional.normalize(other[:, :5], dim=-1))
    assert_close(found["last"], hidden[-1])


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_each_token_has_its_labels_whole_or_in_chunks(chunk_size: int | None, tmp_path: Path) -> None:
    model = make(tmp_path, "GPT2ForSequenceClassification")
    logits = PoolingParams(task=PoolingTask.TOKEN_CLASSIFY, use_activation=False)
    prompts = {"logits": (PROMPTS[0], logits), "shares": (PROMPTS[2], replace(logits, use_activation=True))}
    found = pool_prompts(start(tmp_path), prompts, chunk_size=chunk_size)
    with torch.inference_mode():
        expected, other = (
            model.score(model.transformer(torch.tensor([prompt])).last_hidden_state[0])
            for prompt in (PROMPTS[0], PROMPTS[2])
        )
    assert_close(found["logits"].reshape(expected.shape), expected)
    assert_close(found["shares"].reshape(other.shape), other.softmax(-1))


# --- what a configuration makes of logits ----------------------------------------------------------------------------

LOGITS = torch.tensor([[0.5, -1.0, 2.0]])


@pytest.mark.parametrize(
    ("config", "num_labels", "expected"),
    [
        ({}, 1, torch.sigmoid(LOGITS)),
        ({}, 3, torch.softmax(LOGITS, -1)),
        ({"problem_type": "regression"}, 1, LOGITS),
        ({"problem_type": "single_label_classification"}, 3, torch.softmax(LOGITS, -1)),
        ({"problem_type": "single_label_classification"}, 1, torch.sigmoid(LOGITS)),
        ({"problem_type": "multi_label_classification"}, 3, torch.sigmoid(LOGITS)),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, LOGITS),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, LOGITS),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 3, torch.sigmoid(LOGITS)),
        ({"sentence_transformers": {"version": "5"}}, 1, torch.sigmoid(LOGITS)),
    ],
)
def test_the_activation_is_the_configurations(config: dict[str, Any], num_labels: int, expected: torch.Tensor) -> None:
    torch.testing.assert_close(label_activation(config, num_labels)(LOGITS), expected)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"problem_type": "mystery"}, "problem_type 'mystery'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "cross encoder 'Tanh'"),
    ],
)
def test_an_activation_that_there_is_not_is_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        label_activation(config, 1)


@pytest.mark.parametrize(
    ("config", "num_labels"),
    [({"id2label": {"0": "no", "1": "yes", "2": "maybe"}}, 3), ({"num_labels": 1}, 1), ({}, 2), ({"id2label": {}}, 2)],
)
def test_labels_are_counted_by_their_names(config: dict[str, Any], num_labels: int) -> None:
    assert read_num_labels(config) == num_labels


def test_a_classifiers_head_must_be_in_the_checkpoint() -> None:
    model_class = load_model_class("LlamaForSequenceClassification")
    model = model_class(CONFIGS["Llama"] | {"num_labels": 2}, torch.float32, torch.device("cpu"))
    weights = {name: torch.zeros(slot.shape) for name, slot in model.slots().items()}
    del weights["score.weight"]
    with pytest.raises(ValueError, match=r"missing: score\.weight"):
        model.load_weights(weights.items())
