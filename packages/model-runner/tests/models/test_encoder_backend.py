"""Encoders and classifiers of transformers give the numbers of transformers, alone and in batches of mixed lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_runner_helpers.pool_prompts import pool_prompts
from safetensors import safe_open

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import ModelRunnerConfig, PoolingParams, PoolingTask, PoolingType

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_class import random_model, small_config  # noqa: E402
from model_runner_helpers.every_encoder import (  # noqa: E402
    BY_LENGTH,
    PACKED,
    TOLERANCE,
    compare,
    load,
    states_of,
    tokens_of,
    verdict,
)

from llmstack_model_runner.models.transformers_backend.resolve import UnsupportedByTransformersError  # noqa: E402
from llmstack_model_runner.models.transformers_backend.row_attention import windowed_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of many classes, at their import

SHORT_WINDOW = {
    "local_attention": 8,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "AlbertModel": (PACKED, {}),
    "AlbertForSequenceClassification": (PACKED, {}),
    "BertModel": (PACKED, {}),
    "BertForMaskedLM": (PACKED, {}),
    "BertForTokenClassification": (PACKED, {}),
    "BigBirdForSequenceClassification": (BY_LENGTH, {"attention_type": "original_full"}),
    "CamembertModel": (PACKED, {"pad_token_id": 1}),
    "DebertaV2Model": (BY_LENGTH, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DebertaV2ForSequenceClassification": (BY_LENGTH, {}),
    "DistilBertForTokenClassification": (PACKED, {}),
    "ElectraModel": (PACKED, {}),
    "ElectraForSequenceClassification": (PACKED, {}),
    "EuroBertModel": (PACKED, {}),
    "Gemma3TextModel": (PACKED, {"use_bidirectional_attention": True, "sliding_window": 9}),
    "GteModel": (PACKED, {}),
    "JinaEmbeddingsV3Model": (PACKED, {}),
    "MPNetModel": (BY_LENGTH, {"pad_token_id": 1}),
    "MPNetForSequenceClassification": (BY_LENGTH, {"pad_token_id": 1}),
    "ModernBertModel": (PACKED, SHORT_WINDOW),
    "ModernBertForMaskedLM": (PACKED, SHORT_WINDOW),
    "ModernBertForSequenceClassification": (PACKED, {"classifier_pooling": "mean"}),
    "ModernBertForTokenClassification": (PACKED, SHORT_WINDOW),
    "NomicBertModel": (PACKED, {}),
    "T5EncoderModel": (BY_LENGTH, {}),
    "XLMRobertaForTokenClassification": (PACKED, {"pad_token_id": 1}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "BartForSequenceClassification": ("it is an encoder and a decoder", {}),
    "BigBirdModel": ("its attention picks tokens at random", {}),
    "Gemma3TextModel": ("its tokens attend to none behind them", {}),
    "LlamaForTokenClassification": ("its tokens attend to none behind them", {}),
}


def save(folder: Path, architecture: str, **changes: Any) -> Any:
    """A random model of transformers, saved."""
    model_class = getattr(transformers, architecture)
    model = random_model(model_class, small_config(model_class.config_class, {"num_labels": 3} | changes))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("architecture", CLASSES)
def test_numbers_equal_transformers_alone_and_in_a_batch(architecture: str) -> None:
    way, changes = CLASSES[architecture]
    assert verdict(architecture, changes, TOLERANCE) == way


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_class_that_is_no_encoder_is_refused(architecture: str) -> None:
    reason, changes = REFUSED[architecture]
    assert reason in verdict(architecture, changes)


def test_a_layer_with_a_window_sees_that_far_to_both_sides() -> None:
    generator = torch.Generator().manual_seed(0)
    for length, reach in ((300, 20), (129, 1), (7, 20), (256, 127), (40, 0)):
        query, key, value = torch.randn(3, length, 2, 16, generator=generator).unbind(0)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * 0.3
        place = torch.arange(length)
        scores.masked_fill_((place[:, None] - place).abs() > reach, -torch.inf)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())
        found = windowed_attention(query, key, value, 0.3, reach)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_long_rows_of_narrow_windows_equal_transformers(tmp_path: Path) -> None:
    save(tmp_path, "ModernBertModel", **SHORT_WINDOW, max_position_embeddings=512)
    reference = transformers.ModernBertModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert compare(reference, load(tmp_path, 512), (300, 5, 129)) == PACKED


def test_a_step_with_more_tokens_than_positions_is_computed_in_parts(tmp_path: Path) -> None:
    reference = save(tmp_path, "BertModel", max_position_embeddings=40)
    assert compare(reference, load(tmp_path, 40), (40, 1, 39, 30, 30)) == PACKED
    reference = save(tmp_path, "Tipsv2TextModel", max_position_embeddings=40)  # it counts the tokens of a call
    assert compare(reference, load(tmp_path, 40), (40, 1, 39, 30, 30)) == PACKED


def test_a_prompt_at_the_end_of_a_table_of_positions_equals_transformers(tmp_path: Path) -> None:
    save(tmp_path, "CamembertModel", pad_token_id=1)
    model = load(tmp_path, 62)
    assert model.kv_spec.max_model_len == 62  # of 64 rows two are not those of a token
    reference = transformers.CamembertModel.from_pretrained(tmp_path).eval()
    assert compare(reference, model, (62, 3)) == PACKED


def test_scores_that_take_too_much_memory_are_refused_before_they_are_computed(tmp_path: Path) -> None:
    save(tmp_path, "MPNetModel", max_position_embeddings=20_000)
    with pytest.raises(UnsupportedByTransformersError, match="max_model_len must not exceed 3344"):
        load(tmp_path, 20_000)


def test_a_row_has_the_same_numbers_beside_any_others(tmp_path: Path) -> None:
    save(tmp_path, "ModernBertModel", **SHORT_WINDOW)
    model = load(tmp_path)
    prompts = tokens_of((17, 3, 40, 17))
    together = states_of(model, prompts)
    for prompt, states in zip(prompts, together, strict=True):
        torch.testing.assert_close(states_of(model, [prompt])[0], states, rtol=0, atol=1e-6)


def test_half_precision_is_that_of_transformers(tmp_path: Path) -> None:
    save(tmp_path, "GteModel")
    reference = transformers.GteModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    prompt = tokens_of((21,))[0]
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([prompt])).last_hidden_state[0].float()
    found = states_of(load(tmp_path, dtype=torch.bfloat16), [prompt, prompt[:4]])[0]
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() <= 0.05 * expected.abs().max()


def start(folder: Path) -> ModelRunner:
    """A runner with the model of a folder through transformers."""
    config = ModelRunnerConfig(
        str(folder), block_size=4, max_model_len=32, max_num_seqs=8, device="cpu", model_impl="transformers"
    )
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(64)
    return runner


def test_the_runner_tells_pairs_apart_and_gives_their_labels(tmp_path: Path) -> None:
    model = save(tmp_path, "ElectraForSequenceClassification", type_vocab_size=2)
    prompt, others = tokens_of((11, 4))
    params = PoolingParams(PoolingType.CLS, task=PoolingTask.CLASSIFY, use_activation=False, second_text_start=5)
    single = PoolingParams(PoolingType.CLS, task=PoolingTask.CLASSIFY, use_activation=False)
    found = pool_prompts(start(tmp_path), {"pair": (prompt, params), "text": (others, single)})
    types = torch.tensor([[0] * 5 + [1] * 6])
    with torch.no_grad():
        pair = model(torch.tensor([prompt]), token_type_ids=types).logits[0].numpy()
        text = model(torch.tensor([others])).logits[0].numpy()
    np.testing.assert_allclose(found["pair"], pair, atol=1e-5)
    np.testing.assert_allclose(found["text"], text, atol=1e-5)


def test_the_runner_gives_labels_of_tokens(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForTokenClassification")
    prompts = tokens_of((11, 4))
    params = PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)
    found = pool_prompts(start(tmp_path), {str(index): (prompt, params) for index, prompt in enumerate(prompts)})
    for index, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(found[str(index)].reshape(expected.shape), expected, atol=1e-5)


def test_a_checkpoint_of_nomic_has_names_of_its_own(tmp_path: Path) -> None:
    """As `nomic-ai/nomic-embed-text-v1.5` has them: fields of GPT-2, and queries, keys and values in one matrix."""
    reference = save(tmp_path, "NomicBertModel", hidden_act="silu", pad_token_id=0)
    config = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "causal": False, "layer_norm_epsilon": 1e-12, "mlp_fc1_bias": False, "n_embd": 32, "n_head": 4, "n_inner": 40,
        "n_layer": 4, "n_positions": 64, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "type_vocab_size": 2, "vocab_size": 97,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"encoder.layers.0.attn.Wqkv.weight", "emb_ln.weight", "encoder.layers.1.mlp.fc11.weight"} <= names
    assert compare(reference, load(tmp_path)) == PACKED
