"""Layers behind the states of a model: those of sentence-transformers, and ColBERT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.pool_prompts import pool_prompts
from safetensors.torch import load_file, save_file

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import EngineStartError, ModelRunnerConfig, PoolingParams, PoolingTask, PoolingType

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_class import random_model, small_config  # noqa: E402
from model_runner_helpers.every_encoder import tokens_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of classes, at their import

PROMPTS = tokens_of((11, 4, 7))
WIDE, NARROW = torch.randn(48, 32), torch.randn(16, 48)
BIAS = torch.randn(16)


def save(folder: Path, architecture: str, **changes: Any) -> Any:
    """A random model of transformers, saved."""
    model_class = getattr(transformers, architecture)
    model = random_model(model_class, small_config(model_class.config_class, changes))
    model.save_pretrained(folder)
    return model


def write_dense(folder: Path, path: str, weights: dict[str, torch.Tensor], **fields: Any) -> None:
    """The files of one linear layer."""
    (folder / path).mkdir()
    out_features, in_features = weights["linear.weight"].shape
    config = {"in_features": in_features, "out_features": out_features, "bias": "linear.bias" in weights, **fields}
    (folder / path / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / path / "model.safetensors")


def write_modules(folder: Path, *kinds: str) -> None:
    """The list of modules."""
    modules = [{"path": f"{i}_{kind}" if i else "", "type": f"a.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))


def start(folder: Path, **changes: Any) -> ModelRunner:
    """A runner with the model of a folder."""
    config = ModelRunnerConfig(str(folder), block_size=4, max_model_len=32, max_num_seqs=8, device="cpu", **changes)
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(64)
    return runner


def pooled(runner: ModelRunner, params: PoolingParams) -> list[np.ndarray]:
    """Numbers of the prompts."""
    found = pool_prompts(runner, {str(index): (prompt, params) for index, prompt in enumerate(PROMPTS)})
    return [found[str(index)] for index in range(len(PROMPTS))]


def hidden_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """What transformers computes for one prompt."""
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return hidden


def test_vectors_pass_the_layers_of_embedding_gemma(tmp_path: Path) -> None:
    model = save(tmp_path, "Gemma3TextModel", use_bidirectional_attention=True, sliding_window=9)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    write_dense(tmp_path, "2_Dense", {"linear.weight": WIDE}, **identity)
    write_dense(tmp_path, "3_Dense", {"linear.weight": NARROW, "linear.bias": BIAS})  # and Tanh
    runner = start(tmp_path)
    assert runner.kv_cache_spec().embedding_size == 16
    for dimensions in (None, 8):
        params = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED, dimensions=dimensions)
        for prompt, numbers in zip(PROMPTS, pooled(runner, params), strict=True):
            vector = torch.tanh(NARROW @ (WIDE @ hidden_of(model, prompt).mean(0)) + BIAS)[:dimensions]
            np.testing.assert_allclose(numbers, (vector / vector.norm()).numpy(), atol=2e-5)
    states = pooled(runner, PoolingParams(task=PoolingTask.TOKEN_EMBED))
    np.testing.assert_allclose(states[0].reshape(11, 32), hidden_of(model, PROMPTS[0]).numpy(), atol=2e-4)


def test_vectors_of_tokens_pass_a_layer_where_nothing_is_pooled(tmp_path: Path) -> None:
    model = save(tmp_path, "ModernBertModel")
    write_modules(tmp_path, "Transformer", "Dense")
    weight = torch.randn(8, 32)
    write_dense(tmp_path, "1_Dense", {"linear.weight": weight}, activation_function="torch.nn.Identity")
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=True)
    for prompt, numbers in zip(PROMPTS, pooled(start(tmp_path), params), strict=True):
        expected = torch.nn.functional.normalize(hidden_of(model, prompt) @ weight.T, dim=-1)
        np.testing.assert_allclose(numbers.reshape(len(prompt), 8), expected.numpy(), atol=1e-5)


def test_colbert_has_its_layer_among_the_weights(tmp_path: Path) -> None:
    """As `colbert-ir/colbertv2.0` has it: `bert.` before the names of BERT, and `linear.weight` without a bias."""
    model = save(tmp_path, "BertModel")
    weight = torch.randn(8, 32)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = start(tmp_path)
    assert runner.kv_cache_spec().embedding_size == 8
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=True)
    for prompt, numbers in zip(PROMPTS, pooled(runner, params), strict=True):
        expected = torch.nn.functional.normalize(hidden_of(model, prompt) @ weight.T, dim=-1)
        np.testing.assert_allclose(numbers.reshape(len(prompt), 8), expected.numpy(), atol=1e-5)
    assert start(tmp_path, load_format="dummy").kv_cache_spec().embedding_size == 128


def test_a_layer_without_safetensors_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "BertModel")
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    write_dense(tmp_path, "2_Dense", {"linear.weight": WIDE}, out_features=47)
    with pytest.raises((EngineStartError, ModelFilesError), match=r"must be finite numbers of shape \[47, 32\]"):
        start(tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises((EngineStartError, ModelFilesError), match=r"2_Dense/model.safetensors is missing"):
        start(tmp_path)
