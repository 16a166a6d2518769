"""DeepSeek V2 and V3: published configurations and names, bits of logits, FP8 blocks, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.device_runners import needs_native_kernels
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_types import KVTensorSpec, ModelRunnerConfig

pytest.importorskip("transformers")

from model_runner_helpers.published_deepseek import PUBLISHED, load, write_published

CPU = torch.device("cpu")
PROMPT = [(7 * i + 3) % 97 for i in range(40)]


@pytest.mark.parametrize("is_fp8", [False, True], ids=["float32", "fp8 blocks"])
@pytest.mark.parametrize("changes", [{}, {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}], ids=str)
def test_a_published_checkpoint_has_transformers_logits(
    tmp_path: Path, is_fp8: bool, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reference_type = {"model_type": "deepseek_v3"} if changes else {}
    config, reference = write_published(tmp_path, is_fp8=is_fp8, **(changes | reference_type))
    model = load(tmp_path, config | changes)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    actual = PagedHarness(model, torch.float32).step([("whole", PROMPT)])
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert not caplog.records  # tensors of multi-token prediction are no surprise


@needs_native_kernels
def test_bits_of_logits_do_not_depend_on_cuts_neighbours_and_blocks(tmp_path: Path) -> None:
    model = load(tmp_path, write_published(tmp_path, is_fp8=False)[0])
    whole = PagedHarness(model, torch.float32).step([("whole", PROMPT)])
    for block_size in (1, 8, 16):
        for cuts in ([1] * 40, [7] * 5 + [5], [23, 17], [39, 1]):
            harness = PagedHarness(model, torch.float32, num_blocks=200, block_size=block_size)
            ends = [sum(cuts[:count]) for count in range(len(cuts) + 1)]
            parts = []
            for number, (start, end) in enumerate(pairwise(ends)):
                rows = [("cut", PROMPT[start:end])]
                if number == 0:
                    rows.insert(0, ("neighbour", PROMPT[5:20]))
                parts.append(harness.step(rows)[-(end - start) :])
            assert torch.equal(torch.cat(parts), whole), (block_size, cuts)


def test_a_token_takes_one_latent_of_the_storage(tmp_path: Path) -> None:
    config, _ = write_published(tmp_path, is_fp8=False)
    runner = ModelRunner(ModelRunnerConfig(str(tmp_path), max_model_len=64, device="cpu", dtype="float32"))
    runner.load_model()
    (group,) = runner.kv_cache_spec().groups
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert (group.kind, group.layers) == ("latent", (0, 1))
    assert group.tensors == (KVTensorSpec("latent", (1, 16, width), "float32"),)
    assert runner.kv_cache_spec().bytes_per_block == 2 * 16 * width * 4
    runner.initialize_kv_cache(4)
    assert [tuple(tensor.shape for tensor in layer) for layer in runner._kv_caches] == [((4, 1, 16, width),)] * 2
    assert runner.backends()["numeric_contract"] == "holds" or "native" not in runner.backends()["paged_attention"]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method greedy is not supported"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("DeepseekV3ForCausalLM", {"n_group": 8, "topk_group": 4}, "8 experts do not form 8 groups"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 5}, "5 experts of a token are more than 2 of 4 groups have"),
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, "index_topk 2048 is not supported"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method noaux_tc is not supported"),
    ],
)
def test_variants_without_code_are_refused_by_their_field(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    config = PUBLISHED | changes
    if architecture == "DeepseekV2ForCausalLM":
        v2 = {"scoring_func": "softmax", "norm_topk_prob": False, "topk_method": "group_limited_greedy"}
        config = PUBLISHED | v2 | changes
    with pytest.raises(ValueError, match=message):
        load_model_class(architecture)(config, torch.float32, CPU)


def test_experts_of_groups_that_are_not_among_the_best_are_not_chosen() -> None:
    logits = torch.tensor([[4.0, -4.0, 2.0, 2.0, 1.5, 1.5, -1.0, 3.0]])
    routing = GroupedRouting(num_groups=4, num_group_choices=2, scaling=2.0, is_corrected=True, is_normalised=True)
    shares, experts = routing.choose(logits, torch.zeros(8), 3)
    # The first expert is the best one, but the second of its group is the worst.
    assert set(experts[0].tolist()) <= {2, 3, 4, 5}
    assert math.isclose(float(shares.sum()), 2.0, rel_tol=1e-6)
    by_best = GroupedRouting(num_groups=4, num_group_choices=2).choose(logits, None, 3)[1]
    assert set(by_best[0].tolist()) <= {0, 1, 6, 7}
    corrected = routing.choose(logits, torch.tensor([0, 2.0, 0, 0, 0, 0, 0, 0]), 3)
    assert {0, 1} <= set(corrected[1][0].tolist())
    weight = float(corrected[0][0][corrected[1][0] == 1])
    assert weight < 0.1  # the correction is for the choice alone
