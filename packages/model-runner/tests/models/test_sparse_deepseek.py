"""DeepSeek V3.2 and GLM-5 beyond what their indexers select: logits, bits, published names, storage, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.device_runners import needs_native_kernels
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_runner.layers import key_indexer
from llmstack_model_runner.layers.sharding import Sharding, sharded
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_types import KVTensorSpec, ModelRunnerConfig

pytest.importorskip("transformers")

from model_runner_helpers.published_deepseek import PUBLISHED, load, write_published

CPU = torch.device("cpu")
NUM_SELECTED = 16
PROMPT = [(7 * i + 3) % 97 for i in range(90)]
SPARSE = {"index_topk": NUM_SELECTED, "index_n_heads": 16, "index_head_dim": 32}
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 4, "n_group": 1,
    "topk_group": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepSeek V3.2": SPARSE | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "GLM-5": SPARSE | GLM,
    "GLM-5 with shared selections": SPARSE | GLM | {"indexer_types": ["full", "shared", "full", "shared"]},
}


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A checkpoint, and transformers' logits of the prompt."""
    folder = tmp_path_factory.mktemp("published")
    config, reference = write_published(folder, is_fp8=False, **FAMILIES[request.param])
    with torch.no_grad():
        yield folder, (config, reference(torch.tensor([PROMPT])).logits[0])


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


def test_logits_beyond_what_is_selected_are_transformers_in_any_chunks(published: tuple[Path, Any]) -> None:
    folder, (config, expected) = published
    model = load(folder, config)
    for cuts in ([90], [7] * 12 + [6], [23] * 3 + [21], [40, *[1] * 50]):
        harness = PagedHarness(model, torch.float32, block_size=8)
        ends = [sum(cuts[:count]) for count in range(len(cuts) + 1)]
        parts = [harness.step([("cut", PROMPT[start:end])]) for start, end in pairwise(ends)]
        assert is_close(torch.cat(parts), expected), cuts
    dense = load(folder, config | {"index_topk": 90})
    assert not is_close(PagedHarness(dense, torch.float32).step([("dense", PROMPT)]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_blocks_of_an_indexer_are_read(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reference = write_published(tmp_path, is_fp8=True, **FAMILIES[family])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert is_close(PagedHarness(load(tmp_path, config), torch.float32).step([("whole", PROMPT)]), expected)
    assert not caplog.records


@needs_native_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_cuts_neighbours_and_blocks(published: tuple[Path, Any], dtype: torch.dtype) -> None:
    folder, (config, _) = published
    model = load(folder, config, dtype)
    whole = PagedHarness(model, dtype).step([("whole", PROMPT)])
    for block_size in (1, 8, 16):
        for cuts in ([1] * 90, [7] * 12 + [6], [23] * 3 + [21], [89, 1]):
            harness = PagedHarness(model, dtype, num_blocks=300, block_size=block_size)
            ends = [sum(cuts[:count]) for count in range(len(cuts) + 1)]
            parts = []
            for number, (start, end) in enumerate(pairwise(ends)):
                rows = [("cut", PROMPT[start:end])]
                if number < 2:  # one that selects, and one that does not
                    rows = [("long", PROMPT[5:45]), *rows, ("short", PROMPT[8:12])]
                own = sum(len(tokens) for name, tokens in rows if name == "long")
                parts.append(harness.step(rows)[own : own + end - start])
            assert torch.equal(torch.cat(parts), whole), (block_size, cuts)


def test_nothing_is_selected_while_contexts_are_short(
    published: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (config, expected) = published
    num_calls = 0
    select_keys = key_indexer.select_keys

    def counted(inputs: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return select_keys(inputs)

    monkeypatch.setattr(key_indexer, "select_keys", counted)
    harness = PagedHarness(load(folder, config), torch.float32)
    assert is_close(harness.step([("a", PROMPT[:NUM_SELECTED])]), expected[:NUM_SELECTED])
    assert num_calls == 0
    assert is_close(harness.step([("a", PROMPT[NUM_SELECTED : NUM_SELECTED + 1])]), expected[NUM_SELECTED])
    kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
    assert num_calls == kinds.count("full")


def test_an_indexers_keys_lie_beside_the_latents(published: tuple[Path, Any]) -> None:
    folder, (config, _) = published
    runner = ModelRunner(ModelRunnerConfig(str(folder), max_model_len=64, device="cpu", dtype="float32"))
    runner.load_model()
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    latent, keys = (KVTensorSpec(*own, "float32") for own in (("latent", (1, 16, width)), ("index_keys", (1, 16, 32))))
    groups = [(group.kind, group.layers, group.tensors) for group in runner.kv_cache_spec().groups]
    if "indexer_types" in config:
        assert groups == [("latent", (0, 2), (latent, keys)), ("latent", (1, 3), (latent,))]
    else:
        assert groups == [("latent", tuple(range(config["num_hidden_layers"])), (latent, keys))]
    assert runner.backends()["numeric_contract"] == "holds" or "native" not in runner.backends()["key_selection"]


def test_a_stage_begins_with_a_layer_that_selects() -> None:
    config = PUBLISHED | FAMILIES["GLM-5 with shared selections"]
    model_class = load_model_class("GlmMoeDsaForCausalLM")
    for stage in range(2):
        with sharded(Sharding(stage=stage, num_stages=2)):
            model_class(config, torch.float32, CPU)
    with (
        sharded(Sharding(stage=3, num_stages=4)),
        pytest.raises(ValueError, match="pipeline_parallel_size: a stage would begin with layer 3"),
    ):
        model_class(config, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFSFSFS"),
        ({"index_topk_pattern": "FSSFFSSS"}, "FSSFFSSS"),
        ({"indexer_types": ["full", *["shared"] * 7], "index_topk_pattern": "FSSFFSSS"}, "FSSSSSSS"),
    ],
)
def test_which_layers_select_is_read_as_transformers_does(changes: dict[str, Any], expected: str) -> None:
    import transformers

    config = PUBLISHED | SPARSE | GLM | {"num_hidden_layers": 8} | changes
    layers = load_model_class("GlmMoeDsaForCausalLM").read_settings(config).layers  # type: ignore[attr-defined]
    assert "".join("S" if layer.latent.indexer.is_shared else "F" for layer in layers) == expected
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=8, **changes).indexer_types
    assert "".join(kind[0].upper() for kind in theirs) == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("DeepSeek V3.2", {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        ("DeepSeek V3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave True is not supported"),
        ("DeepSeek V3.2", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("DeepSeek V3.2", {"index_topk": 0}, "index_topk must be a positive integer"),
        ("DeepSeek V3.2", {"index_head_dim": 8}, "index_head_dim 8 is less than qk_rope_head_dim 16"),
        ("GLM-5", {"indexer_types": ["shared"] * 4}, "indexer_types must name each layer full or shared, the first"),
        ("GLM-5", {"indexer_types": ["full"]}, "indexer_types must name each layer full or shared"),
        ("GLM-5", {"index_topk_pattern": "FXSS"}, "indexer_types must name each layer full or shared"),
    ],
)
def test_variants_without_code_are_refused_by_their_field(family: str, changes: dict[str, Any], message: str) -> None:
    config = PUBLISHED | FAMILIES[family] | changes
    with pytest.raises(ValueError, match=message):
        load_model_class(config["architectures"][0])(config, torch.float32, CPU)
