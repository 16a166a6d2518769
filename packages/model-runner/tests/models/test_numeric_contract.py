"""Logits of a position are bit-equal in any schedule, which random schedules try to disprove."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runner_helpers.device_runners import needs_native_kernels

from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.weight_slot import WeightSlot
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import CausalLM, load_model_class
from llmstack_model_runner.models.base import KVCaches
from llmstack_model_runner.models.numeric_contract import HOLDS, describe_numeric_contract
from llmstack_model_runner.steps.cpu_graphs import GraphRunner
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_model_runner.testing import StepDriver, write_random_weights
from llmstack_types import ModelRunnerConfig, SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 97
MAX_MODEL_LEN = 208  # beyond three of the attention's tiles
NUM_SLOTS = 2048
BLOCK_SIZES = (8, 16, 32)
MAX_NUM_REQUESTS = 6
MAX_NUM_OUTPUTS = 6

# Sizes that are no multiples of the kernels' tiles: panels of 64 columns, pairs of inputs, 6 rows.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 80,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
    "kv_lora_rank": 48, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 3,
        "n_positions": 256,
    },
    "llama": LLAMA,
    "mistral": LLAMA
    | {"architectures": ["MistralForCausalLM"], "head_dim": 32, "sliding_window": 37, "intermediate_size": 57},
    "qwen3 with experts": LLAMA
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 22,
    },
    "deepseek": DEEPSEEK,
    "deepseek with an indexer": DEEPSEEK
    | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 48, "index_n_heads": 5, "index_head_dim": 32},
    "gemma2": LLAMA
    | {
        "architectures": ["Gemma2ForCausalLM"], "hidden_size": 48, "query_pre_attn_scalar": 5,
        "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "sliding_window": 21,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_head": 3, "n_layer": 2,
        "seq_length": 256,
    },
}  # fmt: skip
CASES: dict[str, tuple[str, str, str | None]] = {
    **{f"{name} {dtype}": (name, dtype, None) for name in CONFIGS for dtype in ("float32", "bfloat16")},
    "gpt oss bfloat16": ("gpt oss", "bfloat16", None),
    "llama float16": ("llama", "float16", None),
    "gpt2 float32 int8": ("gpt2", "float32", "int8"),
    "gpt2 bfloat16 int4": ("gpt2", "bfloat16", "int4"),
    "llama bfloat16 int8": ("llama", "bfloat16", "int8"),
    "qwen3 with experts bfloat16 int8": ("qwen3 with experts", "bfloat16", "int8"),
    "llama float16 int8": ("llama", "float16", "int8"),
    "llama float32 int4": ("llama", "float32", "int4"),
}

CONFIGS["gpt oss"] = LLAMA | {
    "architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22,
    "sliding_window": 37,
}  # fmt: skip

needs_native_kernels = needs_native_kernels

Context = tuple[int, ...]


class Recorder(CausalLM):
    """Stands in a runner's model's place and keeps, for every row of every step, its whole context and its new logits.

    Contexts are read through the block tables from a storage of token ids that is written as the KV storage is, so a
    block that was shared, freed or copied wrongly shows as well.
    """

    def __init__(self, model: CausalLM, num_blocks: int, block_size: int) -> None:
        self.rows: list[tuple[Context, torch.Tensor]] = []  # logits of the last tokens of the context
        self._model = model
        self._slots = torch.full((num_blocks, block_size), -1)

    def slots(self) -> dict[str, WeightSlot]:
        """Of the model."""
        return self._model.slots()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """The model's; keeps the logits of all tokens."""
        hidden = self._model.forward(token_ids, positions, metadata, kv_caches)
        self._keep(token_ids, metadata, self.compute_logits(hidden))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's."""
        return self._model.compute_logits(hidden)

    def keep_repeated(self, graphs: GraphRunner, batch: InputBatch, step: StepRows, num_adapted: int = 0) -> Any:
        """Runs a step of decodes that may be repeated natively, past `forward`."""
        decoded = GraphRunner.run(graphs, batch, step, num_adapted)
        if decoded is not None:
            inputs = prepare_inputs(batch, step, torch.device("cpu"))
            self._keep(inputs.token_ids, inputs.attention_metadata, decoded.logits.clone())
        return decoded

    def _keep(self, token_ids: torch.Tensor, metadata: AttentionMetadata, logits: torch.Tensor) -> None:
        self._slots.view(-1)[metadata.slot_mapping] = token_ids
        starts = metadata.query_start_loc_list
        for row, seq_len in enumerate(metadata.seq_lens_list):
            context = self._slots[metadata.block_tables[row].long()].view(-1)[:seq_len]
            self.rows.append((tuple(context.tolist()), logits[starts[row] : starts[row + 1]]))


class Subject:
    """One loaded model whose every logit is recorded."""

    def __init__(self, folder: Path, case: str, block_size: int, *, enforce_eager: bool = False) -> None:
        _, dtype, quantization = CASES[case]
        self.runner = ModelRunner(
            ModelRunnerConfig(
                str(folder),
                dtype=dtype,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=MAX_NUM_REQUESTS * MAX_MODEL_LEN,
                max_num_seqs=MAX_NUM_REQUESTS,
                block_size=block_size,
                device="cpu",
                quantization=quantization,
                enforce_eager=enforce_eager,
            )
        )
        self.runner.load_model()
        self._block_size = block_size

    @contextmanager
    def recorded(self) -> Iterator[tuple[StepDriver, Recorder]]:
        """A driver over storage without any request, as after a start, and what will be recorded."""
        num_groups = max(1, len(self.runner.kv_cache_spec().table_groups))
        num_blocks = NUM_SLOTS // self._block_size * num_groups
        self.runner.initialize_kv_cache(num_blocks)
        steps: Any = self.runner._steps
        recorder = steps._model = Recorder(steps._model, num_blocks, self._block_size)
        if steps._graphs is not None:
            steps._graphs.run = partial(recorder.keep_repeated, steps._graphs)
        yield StepDriver(self.runner, num_blocks), recorder


class Judge:
    """Knows what the logits of a context are: those of one prefill of it, alone, whole, in another runner."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def check(self, rows: list[tuple[Context, torch.Tensor]]) -> None:
        """Fails unless each row's logits are, bit for bit, those of its tokens in a whole prefill."""
        torch.set_num_threads(1)
        known: dict[Context, torch.Tensor] = {}
        with self._subject.recorded() as (driver, recorder):
            for context, found in sorted(rows, key=lambda row: -len(row[0])):
                if context not in known:
                    driver.add("alone", list(context), SamplingParams(temperature=0.0))
                    driver.step({"alone": len(context)})
                    driver.remove("alone")
                    _, logits = recorder.rows[-1]
                    known |= {context[: i + 1]: logits[: i + 1] for i in range(len(context))}
                expected = known[context][-len(found) :]
                assert torch.isfinite(expected).all()
                assert torch.equal(found, expected), describe(context, found, expected)


def describe(context: Context, found: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (found != expected).any(dim=1).nonzero().flatten() + len(context) - len(found)
    worst = (found - expected).abs().max()
    return f"{len(found)} tokens up to {len(context)}: positions {wrong.tolist()} differ by up to {worst:.2g}"


class Schedule:
    """Plays random requests over a driver: what a scheduler may do to them, and some that it would not."""

    def __init__(self, draw: random.Random, driver: StepDriver) -> None:
        self._draw = draw
        self._driver = driver
        self._prompts = self._make_prompts()
        self._num_outputs = {name: draw.randint(1, MAX_NUM_OUTPUTS) for name in self._prompts}
        self._likes_whole_prompts = draw.random() < 0.3

    def play(self) -> None:
        """All requests to their ends."""
        driver, draw = self._driver, self._draw
        torch.set_num_threads(draw.choice([1] * 7 + [2]))  # a second one is slow where others compute too
        for name, prompt in self._prompts.items():
            params = SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=draw.randrange(1000))
            driver.add(name, prompt, params)
        while unfinished := [name for name in self._prompts if len(driver.outputs[name]) < self._num_outputs[name]]:
            chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
            for name in chosen:
                self._try_prefix_hit(name)
            nums = {name: self._num_tokens(name) for name in chosen}
            drafts = {name: self._guess(name) for name, num in nums.items() if num == driver.num_left(name)}
            driver.step(nums, drafts)
            if draw.random() < 0.2:
                driver.preempt(draw.choice(unfinished))
        assert driver.errors == {}

    def _make_prompts(self) -> dict[str, list[int]]:
        draw = self._draw
        common = draw.choices(range(VOCAB_SIZE), k=100)
        prompts = {}
        for index in range(draw.randint(1, MAX_NUM_REQUESTS)):
            own = draw.choices(range(VOCAB_SIZE), k=draw.choice([1, draw.randint(1, 12), draw.randint(1, 80)]))
            prompts[f"request-{index}"] = common[: draw.choice([0, draw.randint(1, 20), draw.randint(1, 100)])] + own
        return prompts

    def _num_tokens(self, name: str) -> int:
        num_left = self._driver.num_left(name)
        return num_left if self._likes_whole_prompts else self._draw.choice([num_left, self._draw.randint(1, num_left)])

    def _try_prefix_hit(self, name: str) -> None:
        num_tokens = len(self._prompts[name]) + len(self._driver.outputs[name])
        if self._driver.num_left(name) == num_tokens and self._draw.random() < 0.7:
            self._driver.share(name, self._draw.choice([other for other in self._prompts if other != name] or [name]))

    def _guess(self, name: str) -> list[int]:
        room = MAX_MODEL_LEN - len(self._prompts[name]) - len(self._driver.outputs[name])
        num_drafts = self._draw.choice([0, 0, self._draw.randint(1, 4)])
        return self._draw.choices(range(VOCAB_SIZE), k=min(num_drafts, room))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model."""
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_random_weights(found[name], seed=1, spread=0.3)
    return found


@pytest.fixture(scope="module")
def find_subject(folders: dict[str, Path]) -> Callable[[str, int], Subject]:
    """Loads a case's model once for each block size."""
    return cache(lambda case, block_size: Subject(folders[CASES[case][0]], case, block_size))


@pytest.fixture(scope="module")
def find_judge(folders: dict[str, Path]) -> Callable[[str], Judge]:
    """A case's judge has a runner of its own, as after a restart."""
    return cache(lambda case: Judge(Subject(folders[CASES[case][0]], case, block_size=32, enforce_eager=True)))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def try_to_disprove(
    find_subject: Callable[[str, int], Subject], find_judge: Callable[[str], Judge], case: str, seed: int
) -> None:
    draw = random.Random(seed)
    subject = find_subject(case, draw.choice(BLOCK_SIZES))
    assert subject.runner.backends()["numeric_contract"] == HOLDS
    with subject.recorded() as (driver, recorder):
        Schedule(draw, driver).play()
    find_judge(case).check(recorder.rows)


@needs_native_kernels
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_no_schedule_changes_a_bit(
    find_subject: Callable[[str, int], Subject], find_judge: Callable[[str], Judge], case: str, seed: int
) -> None:
    try_to_disprove(find_subject, find_judge, case, seed)


@pytest.mark.full
@pytest.mark.timeout(900)
@needs_native_kernels
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_none_of_thousands_of_schedules_changes_a_bit(
    find_subject: Callable[[str, int], Subject], find_judge: Callable[[str], Judge], case: str, seed: int
) -> None:
    try_to_disprove(find_subject, find_judge, case, seed)


def make_model(**changes: Any) -> Any:
    return load_model_class("LlamaForCausalLM")(LLAMA | changes, torch.float32, CPU)


@needs_native_kernels
@pytest.mark.parametrize(
    ("changes", "device", "breach"),
    [
        ({"head_dim": 8}, "cpu", "head_dim of 8"),
        ({}, "meta", "linear runs in PyTorch"),
    ],
)
def test_the_contract_does_not_hold_where_a_kernel_breaks_it(changes: dict[str, Any], device: str, breach: str) -> None:
    said = describe_numeric_contract(make_model(**changes), torch.float32, torch.device(device))
    assert said.startswith("not guaranteed: ")
    assert breach in said


@pytest.mark.parametrize(
    ("op", "breach"), [("linear", "linear layers are packed for speed"), ("paged_attention", "in another order")]
)
def test_a_gpu_keeps_what_it_was_asked_to_keep(op: str, breach: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    code = (
        "import torch\n"
        "from llmstack_kernels.numeric_contract import find_breaches\n"
        "from llmstack_kernels.testing import fixed_order_of_sums\n"
        "with fixed_order_of_sums():\n"
        "    for is_batch_invariant in (False, True):\n"
        "        print(*find_breaches('cpu', torch.float32, 64, is_batch_invariant))\n"
    )
    environment = os.environ | {"LLMSTACK_KERNELS": f"{op}=triton", "TRITON_INTERPRET": "1"}
    fast, invariant = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).splitlines()
    assert breach in fast
    assert breach not in invariant


@needs_native_kernels
def test_determinism_that_was_asked_for_is_kept_or_the_start_refused(tmp_path: Path) -> None:
    def load(folder: Path, **changes: Any) -> ModelRunner:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
        config = ModelRunnerConfig(
            str(folder), load_format="dummy", device="cpu", max_model_len=64, enable_deterministic_inference=True
        )
        runner = ModelRunner(config)
        runner.load_model()
        return runner

    assert load(tmp_path / "good").backends()["numeric_contract"] == HOLDS
    with pytest.raises(ValueError, match=r"^--enable-deterministic-inference: .* head_dim of 8"):
        load(tmp_path / "bad", head_dim=8)


def test_the_contract_does_not_hold_for_foreign_modelling_code() -> None:
    model = make_model()
    model.keeps_numeric_contract, model.implementation = False, "somebody"
    assert "modelling code of somebody" in describe_numeric_contract(model, torch.float32, CPU)


def test_the_contract_does_not_hold_without_native_kernels() -> None:
    code = (
        "import torch; from llmstack_kernels.numeric_contract import find_breaches;"
        "print(*find_breaches('cpu', torch.float32, 64), sep='\\n')"
    )
    environment = os.environ | {"LLMSTACK_KERNELS": "reference"}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).splitlines()
    assert "paged_attention runs in PyTorch" in found
