"""What a configuration leaves out means what transformers' class for it says, in every architecture of the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_files import read_model_config
from llmstack_model_files.config_defaults import DEFAULTS, with_defaults
from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.layers.rotary import RopeParameters, rope_frequencies
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 97
PROMPT = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])
CPU = torch.device("cpu")
# Sizes that fit together with any one of a class's defaults, so that leaving out one field makes a model still.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 64, "num_key_value_heads": 32, "max_position_embeddings": 48, "pad_token_id": 0,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": VOCAB_SIZE, "n_embd": 256, "n_layer": 3, "n_head": 16, "n_positions": 48, "rotary_dim": 8}
EXPERTS_IN_GROUPS: dict[str, Any] = {
    "n_routed_experts": 256, "num_experts_per_tok": 2, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 16,
}  # fmt: skip
# The first has none for its experts of a token; heads of the second would be rotated in 21 of 42 numbers.
WITHOUT_DEFAULT = {"DeepseekV2ForCausalLM", "Glm4MoeForCausalLM"}
WITH_LAYER_TYPES = {"GraniteMoeHybridForCausalLM"}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2_SIZES,
    "GPTJForCausalLM": GPT2_SIZES,
    "BloomForCausalLM": {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "n_layer": 3, "n_head": 4},
    "OPTForCausalLM": SIZES | {"ffn_dim": 40, "num_attention_heads": 4, "word_embed_proj_dim": 256},
    "Qwen3MoeForCausalLM": SIZES | {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralForCausalLM": SIZES | {"num_local_experts": 9, "num_experts_per_tok": 3},
    "DeepseekV2ForCausalLM": SIZES | EXPERTS_IN_GROUPS | {"topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": SIZES | EXPERTS_IN_GROUPS,
    "DeepseekV32ForCausalLM": SIZES | EXPERTS_IN_GROUPS,
    "Glm4MoeForCausalLM": SIZES | EXPERTS_IN_GROUPS,
    "GlmMoeDsaForCausalLM": SIZES | EXPERTS_IN_GROUPS,
    "Mistral4ForCausalLM": SIZES | EXPERTS_IN_GROUPS | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 64},
    "Qwen3_5ForCausalLM": SIZES | {"num_hidden_layers": 4},
    "Qwen3_5MoeForCausalLM": SIZES | {"num_hidden_layers": 4, "num_experts": 9, "num_experts_per_tok": 2},
    "Qwen3NextForCausalLM": SIZES | {"num_hidden_layers": 4, "num_experts": 9, "num_experts_per_tok": 2},
    "KimiLinearForCausalLM": {key: value for key, value in EXPERTS_IN_GROUPS.items() if key != "n_routed_experts"}
    | {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 24, "num_hidden_layers": 5}
    | {"num_attention_heads": 64, "num_local_experts": 256},
    "BailingHybridForCausalLM": {key: value for key, value in EXPERTS_IN_GROUPS.items() if key != "n_routed_experts"}
    | {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 24, "num_hidden_layers": 6}
    | {"num_attention_heads": 64, "num_local_experts": 256},
    "JambaForCausalLM": SIZES | {"num_hidden_layers": 9, "num_experts": 9, "num_experts_per_tok": 3},
    "MambaForCausalLM": {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "num_hidden_layers": 3},
    "FalconMambaForCausalLM": {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "num_hidden_layers": 3},
    "MiniMaxForCausalLM": SIZES | {"num_local_experts": 9, "num_experts_per_tok": 3},
    "Lfm3ForCausalLM": SIZES | {"num_hidden_layers": 5, "head_dim": 8},
    "OlmoHybridForCausalLM": SIZES | {"num_hidden_layers": 4},
    "Mamba2ForCausalLM": SIZES | {"num_heads": 16, "head_dim": 32},
    "NemotronHForCausalLM": SIZES
    | {
        "mamba_num_heads": 32,
        "mamba_head_dim": 16,
        "n_routed_experts": 9,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    },
    "FalconH1ForCausalLM": SIZES | {"mamba_n_heads": 32, "mamba_d_head": 32},
    "Zamba2ForCausalLM": SIZES | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "BambaForCausalLM": SIZES | {"attn_layer_indices": [1], "mamba_n_heads": 32, "mamba_d_head": 16},
    "GraniteMoeHybridForCausalLM": SIZES
    | {"mamba_n_heads": 32, "mamba_d_head": 16, "num_local_experts": 9, "layer_types": ["mamba", "attention", "mamba"]},
    "GptOssForCausalLM": SIZES | {"num_local_experts": 9, "num_experts_per_tok": 2, "head_dim": 8},
}
DECODERS = [name for name in ARCHITECTURES if hasattr(transformers, name)]
# Windows that are on, so that their numbers count.
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def config_class(architecture: str) -> Any:
    return getattr(transformers, architecture).config_class


def complete(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    """All fields, as transformers' class writes them."""
    found: dict[str, Any] = config_class(architecture)(**values).to_dict()
    return {**found, "architectures": [architecture]}


def plain(value: Any) -> Any:
    """Settings in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, RopeParameters):
        return plain([value.rotary_dim, value.max_positions, *rope_frequencies(value)])
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def settings(architecture: str, config: dict[str, Any]) -> Any:
    """What the model's own code reads, or that it refuses."""
    try:
        read = load_model_class(architecture).read_settings  # type: ignore[attr-defined]  # every decoder has it
        return plain(read(with_defaults(config)))
    except ValueError:
        return "refused"


def fields_of(architecture: str) -> list[tuple[str, dict[str, Any]]]:
    """Each field of the class, and sizes without it."""
    sizes = OWN_SIZES.get(architecture, SIZES)
    fields = set(config_class(architecture)().to_dict()) - {"model_type", "architectures", "transformers_version"}
    known = set(config_class(architecture)(**sizes).to_dict())
    windows = {key: value for key, value in WINDOWS.items() if key in known}
    return [(field, chosen) for chosen in (sizes, sizes | windows) for field in sorted(fields | set(sizes))]


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_field_that_is_left_out_has_the_default_of_transformers(architecture: str) -> None:
    differing = []
    for field, sizes in fields_of(architecture):
        left_out = {key: value for key, value in complete(architecture, sizes).items() if key != field}
        if architecture not in WITH_LAYER_TYPES:
            left_out.pop("layer_types", None)  # transformers derives it
        try:
            expected = complete(architecture, {key: value for key, value in left_out.items() if key != "architectures"})
        except Exception:  # noqa: BLE001 - each class has its own checks; nothing to compare with
            continue
        if settings(architecture, left_out) != settings(architecture, expected):
            differing.append((field, "with windows" if "sliding_window" in sizes else ""))
    assert differing == []


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_configuration_without_any_field_is_the_smallest_published_one(architecture: str) -> None:
    model_type = config_class(architecture).model_type
    empty = {"model_type": model_type, "architectures": [architecture]}
    found = settings(architecture, empty)
    assert found == settings(architecture, complete(architecture, {}))
    assert (found == "refused") == (architecture in WITHOUT_DEFAULT)


def test_every_default_is_that_of_transformers() -> None:
    type_to_class = {cls.model_type: cls for cls in transformers.CONFIG_MAPPING.values()}
    for model_type, defaults in DEFAULTS.items():
        made = type_to_class[model_type]()
        rope = (getattr(made, "rope_parameters", None) or {}).get("rope_theta")
        found = {name: rope if name == "rope_theta" else getattr(made, name) for name in defaults}
        assert found == dict(defaults), model_type


def test_experts_without_a_head_size_equal_transformers(tmp_path: Path) -> None:
    """Qwen 3 with experts has none, where Qwen 3 has 128."""
    torch.manual_seed(0)
    values = OWN_SIZES["Qwen3MoeForCausalLM"] | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values, initializer_range=0.3)).eval()
    made.save_pretrained(tmp_path)
    config = read_model_config(tmp_path, {})
    assert "head_dim" not in config
    model = load_model_class("Qwen3MoeForCausalLM")(config, torch.float32, CPU)
    load_weights(model, tmp_path)
    with torch.no_grad():
        expected = made(PROMPT, use_cache=False).logits[0]
    found = PagedHarness(model, torch.float32).step([("a", PROMPT[0].tolist())])  # type: ignore[arg-type]  # a decoder
    assert (found - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))
