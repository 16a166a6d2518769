"""Models that paged attention does not support are refused in a sentence, and no code of a repository is run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_runner_helpers import tiny_configs as tiny
from torch import nn

from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

from llmstack_model_runner.models.transformers_backend import probe  # noqa: E402
from llmstack_model_runner.models.transformers_backend.attention import (  # noqa: E402
    Attend,
    AttentionCall,
    AttentionLayer,
    PagedAttention,
    install,
)
from llmstack_model_runner.models.transformers_backend.model import TransformersModel  # noqa: E402
from llmstack_model_runner.models.transformers_backend.resolve import (  # noqa: E402
    UnsupportedByTransformersError,
    resolve,
)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {name: value for name, value in tiny.SMALL.items() if name != "initializer_range"}
LLAMA = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

SHARED = {
    "model_type": "gemma4_text", "num_hidden_layers": 2, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}  # fmt: skip


def load(architecture: str, **values: Any) -> TransformersModel:
    config = getattr(transformers, architecture).config_class(**values).to_dict()
    model = TransformersModel(config | {"architectures": [architecture]}, torch.float32, CPU)
    load_weights(model, "", "dummy")
    return model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "state of their own"),
        ({"architectures": ["MptForCausalLM"], "model_type": "mpt"}, "no pluggable interface"),
        ({"architectures": ["TheirModel"], "model_type": "theirs", "auto_map": {"AutoModel": "x.py"}}, "never run"),
        ({"architectures": ["TheirModel"], "model_type": "theirs"}, "no causal language model of that name"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "belongs to another class"),
        (LLAMA | {"hidden_size": "many"}, "hidden_size"),
        (
            {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": SHARED},
            "read the keys and values of another model",
        ),
    ],
)
def test_what_a_configuration_gives_away_is_refused_unloaded(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedByTransformersError, match=rf"^{config['architectures'][0]} does not run .*{reason}"):
        TransformersModel(config, torch.float32, CPU)


def test_fields_that_would_choose_code_or_files_are_not_passed_on() -> None:
    fields = {"_attn_implementation": "org/kernel", "fusion_config": {"x": True}, "transformers_weights": "a.bin"}
    config, _ = resolve(LLAMA | fields | {"auto_map": {"AutoConfig": "x.Y"}})
    assert "org/kernel" not in str(config)
    assert not any(getattr(config, name, None) for name in ("fusion_config", "transformers_weights", "auto_map"))


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("BertLMHeadModel", {}, "looks ahead"),
        ("DogeForCausalLM", {}, "neither causal nor a sliding window"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "a state of their own"),
    ],
)  # fmt: skip
def test_what_only_running_shows_is_refused_at_load(architecture: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedByTransformersError, match=reason):
        load(architecture, **(SMALL | values))


def test_what_an_indexer_would_select_of_a_longer_context_limits_the_context() -> None:
    values = {
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "first_k_dense_replace": 2, "index_topk": 32,
    }  # fmt: skip
    model = load("DeepseekV32ForCausalLM", **(SMALL | values))
    model.limit_context(32)
    with pytest.raises(UnsupportedByTransformersError, match="selects 32 tokens of a context, so max_model_len"):
        model.limit_context(33)


def test_longrope_is_refused_beyond_the_context_it_was_trained_for() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    values = SMALL | {"rope_parameters": rope, "original_max_position_embeddings": 32}
    model = load("Phi3ForCausalLM", **values)
    model.limit_context(32)
    with pytest.raises(UnsupportedByTransformersError, match="must not exceed 32"):
        model.limit_context(33)


class Mixer(nn.Module):
    """A model of one layer of attention; `leak` adds what it likes to the hidden states."""

    def __init__(self, leak: Callable[[torch.Tensor], torch.Tensor | float], positions: str = "given") -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.leak = leak
        self.positions = positions
        self.attention = PagedAttention([AttentionLayer(self, 1, 4, 4, None)], torch.float32, CPU)
        install(self, self.attention)

    def run_tokens(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(token_ids[None])[0]
        if self.positions == "given":
            hidden = hidden + positions[:, None] / 10
        elif self.positions == "own":
            hidden = hidden + torch.arange(len(token_ids))[:, None] / 10
        states = hidden[:, None]
        attend: Attend = self.__dict__["llmstack_attend"]
        attended = attend(AttentionCall(self, states, states, states, None, 0.5, {}))
        return attended[:, 0] + self.leak(hidden)


def check(model: Mixer) -> None:
    with torch.inference_mode():
        probe.check_only_attention_connects(model, model.embedding, model.run_tokens)
        install(model, model.attention)
        probe.check_rows_are_independent(model, model.embedding, model.run_tokens, model.attention)


def test_a_layer_that_carries_something_along_the_tokens_is_found() -> None:
    check(Mixer(lambda hidden: 0.0))
    for leak in (lambda hidden: hidden.cumsum(0), lambda hidden: hidden.mean(), lambda hidden: hidden.roll(1, 0)):
        model = Mixer(leak)
        with pytest.raises(probe.ProbeError, match="keep a state of their own"):
            check(model)
        install(model, model.attention)
        with (
            torch.inference_mode(),
            pytest.raises(probe.ProbeError, match="tokens of one request change those of another"),
        ):
            probe.check_rows_are_independent(model, model.embedding, model.run_tokens, model.attention)


def test_a_model_that_counts_positions_itself_is_found_and_one_without_positions_runs() -> None:
    with pytest.raises(probe.ProbeError, match="ignores the positions"):
        check(Mixer(lambda hidden: 0.0, positions="own"))
    check(Mixer(lambda hidden: 0.0, positions="none"))


def test_a_step_whose_calls_of_attention_differ_from_the_probes_ends_with_an_error() -> None:
    model, other = Mixer(lambda hidden: 0.0), nn.Identity()
    states = torch.zeros(1, 1, 4)
    for module, mask, message in ((other, None, "in another order"), (model, states, "a mask of its own")):
        model.attention.begin(probe._metadata([1], 1, CPU), model.attention.make_storage(1, 1))
        with pytest.raises(RuntimeError, match=message):
            model.attention(AttentionCall(module, states, states, states, mask, 0.5, {}))


@pytest.mark.parametrize(
    ("rule", "windows"),
    [
        (lambda b, h, q, k: k <= q, [None, 64]),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), [7]),
        (lambda b, h, q, k: (k <= q) & (k > q - 20), [20]),
        (lambda b, h, q, k: (k <= q) & (q // 24 == k // 24), []),
        (lambda b, h, q, k: k >= 0, []),
        (lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 2)), []),
    ],
    ids=["causal", "window of 7", "window of 20", "chunks of 24", "both ways", "window and first tokens"],
)
def test_a_masks_rule_is_recognised_or_not(rule: Any, windows: list[int | None]) -> None:
    assert [window for window in (None, 64, 7, 8, 6, 20, 24) if probe._is_causal(rule, window, 64)] == windows


def test_a_window_that_stands_only_in_the_mask_is_taken_from_the_configuration() -> None:
    states = torch.zeros(3, 1, 4)
    mask = torch.zeros(1, 1, 3, 3)
    mask.llmstack_rule = lambda b, h, q, k: (k <= q) & (k > q - 7)  # type: ignore[attr-defined]
    call = AttentionCall(nn.Identity(), states, states, states, mask, 0.5, {})
    config = SimpleNamespace(sliding_window=7, max_position_embeddings=64)
    assert probe._window(call, config) == 7
    with pytest.raises(probe.ProbeError, match="neither causal"):
        probe._window(call, SimpleNamespace(sliding_window=5, max_position_embeddings=64))
