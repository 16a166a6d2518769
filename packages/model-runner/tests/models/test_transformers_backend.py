"""Decoders of transformers over blocks compute what they compute over their own cache, however tokens are cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers import tiny_configs as tiny
from model_runner_helpers.paged_harness import PagedHarness, check_neighbours
from safetensors.torch import load_file, save_file

from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models import CausalLM, load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

from llmstack_model_runner.models.transformers_backend.model import TransformersModel  # noqa: E402
from llmstack_model_runner.models.transformers_backend.modules import pack_modules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # some families' at import

VOCAB_SIZE = 97
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
NUM_OUTPUT_TOKENS = 8
TOLERANCE = 2e-5  # of the largest logit, in float32
CPU = torch.device("cpu")
DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "models.md"

SMALL: dict[str, Any] = tiny.SMALL
OPT = {"ffn_dim": 40, "word_embed_proj_dim": 32, "init_std": 0.3}
GPT2 = tiny.GPT2
HEAD_DIM = {"head_dim": 12}
WINDOW = {"sliding_window": 7}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1,
          "topk_group": 1}  # fmt: skip
# Two sizes of heads, keys as values, late layers that share them, embeddings per layer, experts beside dense.
GEMMA_4 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 32,
           "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "pad_token_id": 0,
           "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "enable_moe_block": True,
           "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}  # fmt: skip
# Sinks, other KV heads and narrower values in some layers.
MIMO = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"], "v_head_dim": 8,
        "n_routed_experts": 4}  # fmt: skip

# Architecture to its configuration: what is special about it stands beside it.
CASES: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": SMALL,  # an activation with parameters of its own
    "BioGptForCausalLM": SMALL | {"num_key_value_heads": 4},  # learned positions
    "BitNetForCausalLM": SMALL,
    "CohereForCausalLM": SMALL | {"logit_scale": 0.25},  # parallel blocks
    "Cohere2ForCausalLM": SMALL | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},  # no angles
    "Exaone4ForCausalLM": SMALL | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "GPT2LMHeadModel": GPT2,  # Conv1D in place of linear layers
    "GPTBigCodeForCausalLM": GPT2 | {"multi_query": True},  # one KV head, which no field counts
    "GPTNeoXForCausalLM": SMALL | {"use_parallel_residual": True},
    "Gemma2ForCausalLM": SMALL | HEAD_DIM | WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": SMALL | HEAD_DIM | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4ForCausalLM": SMALL | HEAD_DIM | WINDOW | GEMMA_4,
    "Glm4ForCausalLM": SMALL | HEAD_DIM,
    "Glm4MoeLiteForCausalLM": SMALL | EXPERTS | LATENT,  # keys wider than values
    "GptOssForCausalLM": SMALL | HEAD_DIM | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "GraniteForCausalLM": SMALL | {"logits_scaling": 4.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "HeliumForCausalLM": SMALL | {"head_dim": 8},
    "MiMoV2FlashForCausalLM": SMALL | HEAD_DIM | WINDOW | EXPERTS | MIMO,
    "LlamaForCausalLM": SMALL | {"tie_word_embeddings": True},
    "MixtralForCausalLM": SMALL | {"num_local_experts": 4},  # experts in separate tensors in the checkpoint
    "NemotronForCausalLM": SMALL | {"head_dim": 8},
    "Olmo2ForCausalLM": SMALL,
    "Olmo3ForCausalLM": SMALL | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "OPTForCausalLM": SMALL | OPT,  # the decoder lies deeper
    "PhiForCausalLM": SMALL,  # a head with a bias
    "Phi3ForCausalLM": SMALL | WINDOW,
    "Qwen3MoeForCausalLM": SMALL | HEAD_DIM | EXPERTS,
    "SmolLM3ForCausalLM": SMALL | {"no_rope_layers": [1, 0]},
    "StableLmForCausalLM": SMALL | {"use_parallel_residual": True},
    "Starcoder2ForCausalLM": SMALL | WINDOW,
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A random checkpoint, and the logits of its prompt and greedy continuation."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param, CASES[request.param])
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            min_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
        )
        return folder, model(tokens[:, :-1], use_cache=False).logits[0]


def make_checkpoint(folder: Path, architecture: str, values: dict[str, Any]) -> Any:
    """Writes a random checkpoint in transformers' own way; the model, with its obvious attention."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{"bos_token_id": None, "eos_token_id": None, **values})
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # zeros and ones would hide a tensor that is not used
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", **changes: Any) -> CausalLM:
    config = json.loads((folder / "config.json").read_text()) | changes
    model = TransformersModel(config, dtype, CPU)
    load_weights(model, folder, load_format)
    return model


def expected_tokens(logits: torch.Tensor) -> list[int]:
    return logits[len(PROMPT) - 1 :].argmax(-1).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * scale)


def test_greedy_tokens_and_logits_equal_transformers_in_any_cut(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    harness = PagedHarness(load(folder), torch.float32)
    close(harness.step([("whole", PROMPT)]), expected[: len(PROMPT)])
    assert harness.greedy(PROMPT, NUM_OUTPUT_TOKENS) == expected_tokens(expected)
    tokens = PROMPT + expected_tokens(expected)[:-1]
    check_neighbours(harness, tokens, expected, close)


def test_vectors_stand_in_place_of_tokens_where_the_decoder_takes_them(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, expected = checkpoint
    model = load(folder)
    assert isinstance(model, TransformersModel)
    assert model.vector_size == model._decoder.get_input_embeddings().embedding_dim
    with torch.inference_mode():
        table = model._decoder.get_input_embeddings()(torch.tensor(PROMPT))
        given = StepVectors(torch.arange(2, 9), table[2:9])
        unknown = [*PROMPT[:2], *[0] * 7, *PROMPT[9:]]
        close(PagedHarness(model, torch.float32).step([("a", unknown)], given), expected[: len(PROMPT)])


def test_a_decoder_that_needs_the_ids_takes_no_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM", SMALL)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    forward = model._decoder.forward

    def forward_of_ids(input_ids: torch.Tensor, **arguments: Any) -> Any:
        return forward(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model._decoder, "forward", forward_of_ids)
    assert model.vector_size is None


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MixtralForCausalLM", "OPTForCausalLM"])
def test_made_up_weights_need_no_file_and_are_equal_for_equal_seeds(architecture: str) -> None:
    config = getattr(transformers, architecture).config_class(**CASES[architecture]).to_dict()
    logits = []
    for _ in range(2):
        model = TransformersModel(config | {"architectures": [architecture]}, torch.bfloat16, CPU)
        load_weights(model, "", "dummy", seed=3)
        logits.append(PagedHarness(model, torch.bfloat16).step([("a", PROMPT)]))
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documentation is not part of the distribution")
def test_the_documentations_table_names_every_parity_test() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| transformers \| `(\w+)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert dict(rows) == {name: name for name in CASES}


def test_native_code_and_transformers_generate_the_same_text(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM", CASES["LlamaForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    ours = load_model_class("LlamaForCausalLM")(config, torch.float32, CPU)
    load_weights(ours, tmp_path)
    theirs = load(tmp_path)
    assert theirs.kv_spec == ours.kv_spec
    texts = [PagedHarness(model, torch.float32).greedy(PROMPT, 30) for model in (ours, theirs)]
    assert texts[0] == texts[1]


def test_weights_stay_in_the_mapped_file_where_types_agree(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Olmo2ForCausalLM", CASES["Olmo2ForCausalLM"])
    given = load_file(tmp_path / "model.safetensors")
    model = TransformersModel(json.loads((tmp_path / "config.json").read_text()), torch.float32, CPU)
    model.load_weights(given.items())
    addresses = {tensor.data_ptr() for tensor in given.values()}
    assert {parameter.data_ptr() for parameter in model._model.parameters()} == addresses


def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Olmo2ForCausalLM", CASES["Olmo2ForCausalLM"])
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    weights["extra.weight"] = torch.ones(1)
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight \[5\].*missing: lm_head\.weight.*extra\.weight"):
        load(tmp_path)
    model = TransformersModel(json.loads((tmp_path / "config.json").read_text()), torch.float32, CPU)
    with pytest.raises(ValueError, match="twice: model"):
        model.load_weights([("model.a", torch.ones(1)), ("model.a", torch.ones(1))])
    with pytest.raises(ValueError, match=r"model\.a has values that are NaN or infinite"):
        model.load_weights([("model.a", torch.full((1,), torch.nan))])
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as int8 without the scales"):
        model.load_weights([("model.norm.weight", torch.ones(64, dtype=torch.int8))])


def test_a_configuration_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Olmo2ForCausalLM", CASES["Olmo2ForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text()) | {"rope_parameters": {"rope_type": "other"}}
    model = TransformersModel(config, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"^Olmo2ForCausalLM does not run .*its config\.json makes no model, KeyError"):
        model.slots()


@pytest.mark.parametrize("replacement", [None, torch.ones(3, 3)], ids=["missing", "of a wrong shape"])
def test_an_expert_that_does_not_fit_is_refused(tmp_path: Path, replacement: torch.Tensor | None) -> None:
    make_checkpoint(tmp_path, "MixtralForCausalLM", CASES["MixtralForCausalLM"])
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "experts.1.w1" in name)
    del weights[name]
    save_file(weights | ({} if replacement is None else {name: replacement}), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensors that transformers joins are missing or of a wrong shape"):
        load(tmp_path)


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "MixtralForCausalLM", CASES["MixtralForCausalLM"])
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_packed_weight_has_its_shape_and_gives_its_numbers_to_code_that_reads_them() -> None:
    for made in (torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(5, 5, bias=False)):
        holder = torch.nn.Sequential(made)
        pack_modules(holder)
        layer: Any = holder[0]
        assert (layer.weight.shape, layer.weight.dtype) == (made.weight.shape, torch.float32)
        assert type(layer.weight.float()) is torch.Tensor
        assert torch.equal(layer.weight.float(), made.weight)
        x = torch.randn(3, made.in_features)
        torch.testing.assert_close(torch.nn.functional.linear(x, layer.weight), made(x))
    biased = torch.nn.Sequential(torch.nn.Linear(6, 4))
    pack_modules(biased)
    assert biased[0].weight.isnan().all()
