"""Adapters that are damaged, hostile or of another kind are refused in a sentence; others fit the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.merged import write_config
from safetensors.torch import load_file, save_file

from llmstack_model_files import ModelFilesError, adapter_digest, read_adapter
from llmstack_model_runner.adapters.config import AdapterError, read_adapter_config
from llmstack_model_runner.adapters.load import AdapterLimits, load_adapter
from llmstack_model_runner.adapters.patterns import CostlyPatternError, PatternError, compile_pattern
from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.layers import embedding
from llmstack_model_runner.layers.adaptation import AdaptedLayers, adapted
from llmstack_model_runner.models import Model, load_model_class
from llmstack_model_runner.testing import identity_of, write_random_adapter, write_random_weights
from llmstack_model_runner.weights import load_weights

LIMITS = AdapterLimits(max_rank=8, max_bytes=1 << 20)
PREFIX = "base_model.model.model.layers.0.self_attn."
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


class Loaded:
    """A tiny model with weights, and a good adapter beside it."""

    def __init__(self, folder: Path, architecture: str = "LlamaForCausalLM") -> None:
        self.folder = write_random_weights(write_config(folder / "model", architecture))
        self.layers = AdaptedLayers()
        config = json.loads((self.folder / "config.json").read_text())
        with adapted(self.layers):
            self.model: Model = load_model_class(architecture)(config, torch.float32, torch.device("cpu"))
        load_weights(self.model, self.folder)
        self.adapter = write_random_adapter(folder / "adapter", self.folder, ["q_proj", "v_proj"])

    def read(self, limits: AdapterLimits = LIMITS, digest: str = "") -> Any:
        return load_adapter(self.adapter, digest, self.model, self.layers, (torch.float32, torch.device("cpu")), limits)

    def configure(self, **values: object) -> None:
        path = self.adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def change(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        path = self.adapter / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return Loaded(tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"use_dora": True}, "uses DoRA"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list"),
        ({"modules_to_save": ["lm_head"]}, "no tensor for lm_head, which modules_to_save names"),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, "ties whole modules"),
        ({"target_parameters": ["experts.w1"]}, r"no experts of this model for experts\.w1"),
        ({"target_parameters": "experts.w1"}, "target_parameters must be a list of names"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed base model"),
        ({"r": 0}, "rank of at least 1"),
        ({"r": True}, "rank of at least 1"),
        ({"lora_alpha": "8"}, "finite number"),
        ({"lora_alpha": 10**400}, "finite number"),
        ({"use_newer_lora": True}, "the field 'use_newer_lora', which is not known here"),
        ({"r": 9}, "--max-lora-rank is 8"),
        ({"r": 3}, r"shape \[4, 32\] instead of \[3, 32\]"),
        ({"rank_pattern": {"q_proj": 2}}, r"instead of \[2, 32\]"),
        ({"rank_pattern": ["q_proj"]}, "must be an object"),
        ({"alpha_pattern": {"(q|v)_proj(": 2}}, "is no regular expression"),
        ({"rank_pattern": {"(a+)+b": 2}}, "may take long"),
        ({"target_modules": ["q_proj"]}, "none of the target_modules"),
        ({"target_modules": r".*\.q_proj"}, "none of the target_modules"),
        ({"target_modules": 3}, "list of names"),
        ({"target_modules": "*"}, "no regular expression"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(
    loaded: Loaded, values: dict[str, object], reason: str
) -> None:
    loaded.configure(**values)
    with pytest.raises(AdapterError, match=reason):
        loaded.read()


@pytest.mark.parametrize("target", [["q_proj", "self_attn.v_proj"], r".*\.[qv]_proj", "all-linear", r"(.*a.*)*.*"])
def test_targets_are_suffixes_or_a_regular_expression(loaded: Loaded, target: object) -> None:
    loaded.configure(target_modules=target)
    assert loaded.read().max_rank == 4


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}q_proj.lora_A.weight"][1, 2] = float("nan")


def _infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}v_proj.lora_B.weight"][0, 0] = float("inf")


def _half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{PREFIX}q_proj.lora_B.weight"]


def _misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}q_proj.lora_B.weight"] = torch.zeros(4, 4)


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}q_proj.lora_B.weight"] = torch.zeros(32, 4, dtype=torch.int32)


def _named(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(4, 4)

    return add


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_nan, "NaN"),
        (_infinite, "infinite"),
        (_half, "needs the factors lora_A and lora_B"),
        (_misshapen, r"shape \[4, 4\] instead of \[32, 4\]"),
        (_integers, "stored as I32"),
        (dict.clear, "has no tensors"),
        (_named("base_model.model.lm_head.lora_A.weight"), "needs the factors lora_A and lora_B"),
        (_named("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"), "no linear layer or embedding"),
        (
            _named("base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight"),
            "experts.3.w1, which is no linear layer",
        ),
        (_named("base_model.model.model.embed_tokens.lora_embedding_A"), "lora_embedding_A and lora_embedding_B"),
        (_named("base_model.model.model.embed_tokens.lora_A.weight"), "lora_embedding_A and lora_embedding_B"),
        (_named("base_model.model.model.norm.base_layer.weight"), "no linear layer or embedding"),
        (_named(f"{PREFIX}q_proj.lora_magnitude_vector"), "DoRA"),
        (_named(f"{PREFIX}q_proj.lora_B.bias"), "a bias"),
        (_named("base_model.model.lm_head.weight"), "no factor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    loaded: Loaded, change: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    loaded.change(change)
    with pytest.raises(AdapterError, match=reason):
        loaded.read()


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_stored_table_is_accepted_if_it_is_that_of_the_model(loaded: Loaded, tmp_path: Path, name: str) -> None:
    loaded.adapter = write_random_adapter(tmp_path / "both", loaded.folder, ["embed_tokens", "lm_head"])
    table = load_file(loaded.folder / "model.safetensors")[f"{name}.weight"]
    stored = f"base_model.model.{name}.base_layer.weight"
    loaded.change(lambda tensors: tensors.update({stored: table}))
    assert loaded.read().max_rank == 4
    loaded.change(lambda tensors: tensors[stored][3].add_(0.5))
    with pytest.raises(AdapterError, match="differs from the model's own"):
        loaded.read()
    loaded.change(lambda tensors: tensors.update({stored: table[:-1].clone()}))
    with pytest.raises(AdapterError, match=r"shape \[96, 32\] instead of \[97, 32\]"):
        loaded.read()


@pytest.mark.parametrize("stored", ["{}.weight", "{}.modules_to_save.weight", "{}.modules_to_save.default.weight"])
@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_whole_table_replaces_that_of_the_model(loaded: Loaded, name: str, stored: str) -> None:
    table = load_file(loaded.folder / "model.safetensors")[f"{name}.weight"]
    wanted = torch.randn_like(table)
    tensor = f"base_model.model.{stored.format(name)}"
    loaded.configure(modules_to_save=[name.rpartition(".")[2]])
    loaded.change(lambda tensors: tensors.update({tensor: wanted}))
    part = loaded.layers.parts[name]
    ((a, b, _),) = loaded.read().factors(part.layer)
    update = (b.t() @ a).t() if part.is_embedding else (b.t() @ a)
    torch.testing.assert_close(table + update, wanted, rtol=0, atol=1e-6)
    loaded.change(lambda tensors: tensors.update({tensor: wanted[:-1].clone()}))
    with pytest.raises(AdapterError, match=r"shape \[96, 32\] instead of \[97, 32\]"):
        loaded.read()


def test_a_head_whose_rows_cannot_be_looked_up_is_replaced_too(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.configure(modules_to_save=["lm_head"])
    loaded.change(lambda tensors: tensors.update({"lm_head.weight": torch.ones(97, 32)}))
    part = loaded.layers.parts["lm_head"]
    looked_up = loaded.read().factors(part.layer)[0].b
    monkeypatch.setattr(embedding, "table_of", lambda packed: None)
    torch.testing.assert_close(loaded.read().factors(part.layer)[0].b, looked_up, rtol=0, atol=1e-6)


def test_a_matrix_is_changed_in_one_way(loaded: Loaded) -> None:
    loaded.configure(modules_to_save=["lm_head"], target_modules=["q_proj", "v_proj", "lm_head"])
    tables = {f"{name}.weight": torch.zeros(97, 32) for name in ("lm_head", "lm_head.modules_to_save")}
    loaded.change(lambda tensors: tensors.update(tables))
    with pytest.raises(AdapterError, match="under another name too"):
        loaded.read()
    loaded.change(lambda tensors: tensors.pop("lm_head.weight"))
    assert loaded.read().changes(loaded.layers.parts["lm_head"].layer)
    loaded.change(lambda tensors: tensors.update({"lm_head.lora_A.weight": torch.zeros(4, 32)}))
    with pytest.raises(AdapterError, match="needs the factors lora_A and lora_B, and no others"):
        loaded.read()


def test_a_factor_is_stored_once(loaded: Loaded) -> None:
    name = f"{PREFIX}q_proj.lora_A.weight"
    loaded.change(lambda tensors: tensors.update({name.removeprefix("base_model.model."): tensors[name] + 1}))
    with pytest.raises(AdapterError, match="under another name too"):
        loaded.read()


def test_other_modules_are_not_replaced_as_a_whole(loaded: Loaded) -> None:
    name = f"{PREFIX}q_proj.weight"
    loaded.configure(modules_to_save=["q_proj"])
    loaded.change(lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    with pytest.raises(AdapterError, match="only embedding and head are supported, on one CPU"):
        loaded.read()


@pytest.mark.parametrize(
    "name", ["mlp.experts.lora_A.weight", "mlp.experts.gate_up_proj.lora_A.weight", "mlp.router.lora_A.weight"]
)
def test_what_is_not_in_target_parameters_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    loaded = Loaded(tmp_path, "GptOssForCausalLM")
    assert loaded.read().max_rank == 4
    loaded.change(_named(f"base_model.model.model.layers.0.{name}"))
    with pytest.raises(AdapterError, match="is no linear layer"):
        loaded.read()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}.base_layer.lora_A.weight"), "gate_up_proj needs the factors"),
        (lambda tensors: tensors.pop(f"{EXPERTS}.lora_B.weight"), "down_proj needs the factors lora_A and lora_B"),
        (_named(f"{EXPERTS}.lora_A.weight"), r"shape \[4, 4\] instead of \[16, 48\]"),
        (_named(f"{EXPERTS}.base_layer.lora_B.weight"), r"shape \[4, 4\] instead of \[96, 16\]"),
        (_named(f"{EXPERTS}.base_layer.base_layer.lora_A.weight"), "is no linear layer"),
        (lambda tensors: tensors[f"{EXPERTS}.lora_A.weight"][5].fill_(float("nan")), "NaN"),
    ],
)
def test_factors_of_experts_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    loaded = Loaded(tmp_path, "MixtralForCausalLM")
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    loaded.adapter = write_random_adapter(tmp_path / "experts", loaded.folder, [], target_parameters=parameters)
    loaded.change(
        lambda tensors: [
            tensors.update({name.replace("block_sparse_moe", "mlp"): tensors.pop(name)}) for name in [*tensors]
        ]
    )
    assert loaded.read().max_rank == 4
    with pytest.raises(AdapterError, match="has the rank 4; --max-lora-rank is 3"):
        loaded.read(AdapterLimits(max_rank=3, max_bytes=1 << 20))
    loaded.change(change)
    with pytest.raises(AdapterError, match=reason):
        loaded.read()


def test_files_that_are_damaged_too_large_or_missing_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    path = loaded.adapter / "adapter_model.safetensors"
    content = path.read_bytes()
    assert adapter_digest(loaded.adapter, len(content)) == read_adapter(loaded.adapter, len(content)).digest
    with pytest.raises(ModelFilesError, match="has more than 100 bytes"):
        adapter_digest(loaded.adapter, 100)
    with pytest.raises(AdapterError, match="has more than 100 bytes"):
        loaded.read(AdapterLimits(8, 100))
    with pytest.raises(AdapterError, match="have changed since"):
        loaded.read(digest="0" * 32)
    for cut in (0, 7, 100, len(content) - 4):
        path.write_bytes(content[:cut])
        with pytest.raises(AdapterError, match="damaged"):
            loaded.read()
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(content)
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(AdapterError, match="leads out of the model folder"):
        loaded.read()
    path.unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
        loaded.read()
    (loaded.adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is not opened"):
        loaded.read()
    (loaded.adapter / "adapter_config.json").write_text("[1]")
    path.write_bytes(content)
    with pytest.raises(AdapterError, match="JSON object"):
        loaded.read()


def test_scales_follow_patterns_and_rank_stabilisation() -> None:
    config = read_adapter_config(
        {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["x"],
            "rank_pattern": {"mlp.up": 16, r"layers\.[01]\.q": 2},
            "alpha_pattern": {"^model.layers.3.*": 5},
        }
    )
    assert [config.rank_of(name) for name in ("m.mlp.up", "mlp.up", "m.layers.1.q", "m.layers.2.q")] == [16, 16, 2, 4]
    assert config.scale_of("model.layers.1.q") == 4.0
    assert config.scale_of("model.layers.3.q") == 1.25
    stabilised = read_adapter_config(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["x"], "use_rslora": True}
    )
    assert stabilised.scale_of("x") == 4.0


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|b)*c", ".*.*.*.*", r"(a)\1", "(?=a)b", "a" * 513, "(a){2,9}"])
def test_expressions_that_may_take_long_are_not_run(pattern: str) -> None:
    with pytest.raises(CostlyPatternError):
        compile_pattern(pattern)


def test_other_expressions_match_whole_names() -> None:
    assert compile_pattern(r"model\.layers\.\d+\.(?:q|v)_proj")("model.layers.12.q_proj")
    assert not compile_pattern(r"q_[*+{]")("q_proj")
    with pytest.raises(PatternError, match="no regular expression"):
        compile_pattern("[")


def test_an_adapter_that_does_not_fit_on_a_gpu_is_refused(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    store = AdapterStore(loaded.model, loaded.layers, torch.float32, torch.device("cpu"), LIMITS)
    identity = identity_of(loaded.adapter)
    store.read(identity, str(loaded.adapter))
    monkeypatch.setattr("llmstack_model_runner.adapters.store.load_adapter", fail)
    with pytest.raises(AdapterError, match="no memory for the adapter"):
        store.read(identity, str(loaded.adapter))
