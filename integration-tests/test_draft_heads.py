"""Drafts from hidden states: those of a reference in PyTorch, right as often, and no text depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import state_engine
from draft_engine import Checkpoint, Guesses, count_right, record_guesses, run
from draft_references import NUM_TOKENS, PROMPTS, Eagle, Eagle3, Medusa, OwnLayer, Reference, Speculator

from llmstack_llm import LLM
from llmstack_llm import SamplingParams as Sampling
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify

QWEN = state_engine.QWEN3_5 | {"initializer_range": 0.2}
NEXT = QWEN | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "initializer_range": 0.3,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OF_QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
BEHIND = "model.layers.3."
OF_DEEPSEEK = (BEHIND, f"{BEHIND}enorm", f"{BEHIND}hnorm", f"{BEHIND}eh_proj", f"{BEHIND}shared_head.norm")
GLM = {name: value for name, value in DEEPSEEK.items() if "_lora_" not in name and "head_dim" not in name} | {
    "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
MIMO = QWEN | {"num_hidden_layers": 3, "layer_types": None}
OF_MIMO = tuple(f"model.mtp_layers.0.{name}" for name in
                ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))  # fmt: skip
NEMOTRON = state_engine.NEMOTRON | {"initializer_range": 0.3}
OF_NEMOTRON = tuple(f"mtp.layers.{name}" for name in ("", "0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"))
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
ONE_SPARSE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
KINDS: dict[str, Callable[[], Reference]] = {
    "Qwen3_5Text": lambda: OwnLayer("Qwen3_5", QWEN, ONE_LAYER, OF_QWEN),
    "Qwen3Next": lambda: OwnLayer("Qwen3Next", NEXT, ONE_LAYER, OF_QWEN),
    "DeepseekV3": lambda: OwnLayer("DeepseekV3", DEEPSEEK, ONE_SPARSE, OF_DEEPSEEK),
    "Glm4Moe": lambda: OwnLayer("Glm4Moe", GLM, ONE_SPARSE, OF_DEEPSEEK),
    "MiMo": lambda: OwnLayer(
        "Qwen2",
        MIMO,
        ONE_LAYER,
        OF_MIMO,
        is_hidden_first=True,
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
    ),
    "NemotronH": lambda: OwnLayer("NemotronH", NEMOTRON, {"layers_block_type": ["attention", "moe"]}, OF_NEMOTRON),
    "eagle": Eagle,
    "eagle3": Eagle3,
    "speculators": Speculator,
    "medusa": Medusa,
}
BY_DEFAULT = ("Qwen3_5Text", "eagle3", "medusa")


@pytest.fixture(
    scope="module",
    params=[name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in KINDS],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.write(KINDS[request.param](), tmp_path_factory.mktemp("model"))


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Guesses:
    return record_guesses(monkeypatch)


@pytest.mark.parametrize(("num_drafts", "chunk"), [(1, 64), (3, 64), (2, 7)])
def test_drafts_are_those_of_the_reference_and_right_as_often(
    checkpoint: Checkpoint, guesses: Guesses, num_drafts: int, chunk: int
) -> None:
    core = checkpoint.build(num_drafts, chunk, enable_prefix_caching=False)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, run(core), strict=True)]
    stats = core.stats()
    core.shutdown()
    assert texts == checkpoint.reference.texts
    for known, drafts in guesses:
        assert drafts == checkpoint.reference.drafts(known, len(drafts)), len(known)
    assert stats.num_accepted_draft_tokens == count_right(guesses, texts) > 20
    assert stats.num_draft_tokens == sum(len(drafts) for _, drafts in guesses)


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 24}, {"num_blocks": 24, "num_host_blocks": 64}], ids=str)
def test_no_text_depends_on_them(checkpoint: Checkpoint, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.steps"
    core, alone = checkpoint.build(3, record_steps=str(path), **changes), checkpoint.build(0, **changes)
    for turn, params in enumerate(({}, {}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3})):
        assert run(core, turn, **params) == run(alone, turn, **params)
    stats = core.stats()
    assert (stats.prefix_cache_hits > 0) or changes
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert verify(read_step_log(path)).num_steps == stats.step
    for one in (core, alone):
        one.shutdown()


def test_two_ranks_have_a_part_of_the_head_each(checkpoint: Checkpoint) -> None:
    drafts = {"method": checkpoint.method, "num_speculative_tokens": 2, "is_adaptive": False}
    drafts |= {"model": checkpoint.head} if checkpoint.head else {}
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(checkpoint.path, tensor_parallel_size=2, speculative_config=drafts, **options) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    texts = [prompt + list(one.outputs[0].token_ids) for prompt, one in zip(PROMPTS, outputs, strict=True)]
    assert texts == checkpoint.reference.texts
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match=r"missing: .*mtp\.fc\.weight"):
        Checkpoint(str(tmp_path), "", Reference.__new__(Reference)).build(1)


def test_a_family_without_one_is_refused(tmp_path: Path) -> None:
    state_engine.write_checkpoint(tmp_path, "lfm2")
    with pytest.raises(ValueError, match=r"the method 'mtp' needs a model with a layer"):
        Checkpoint(str(tmp_path), "", Reference.__new__(Reference)).build(1)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 64}, "of a wrong shape"),
        ({"draft_vocab_size": 97}, r"of a wrong shape: lm_head\.weight"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "states are kept after 0 to 3 layers"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"model_type": "deepseek_v3"}, "layers of 'deepseek_v3' are not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    reference = Eagle3()
    head = Path(reference.write(tmp_path))
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ValueError, match=f"draft head .*{reason}"):
        Checkpoint(str(tmp_path / "served"), str(head), reference).build(1)
