"""Vectors of prompts equal the pooled hidden states of transformers, whole or in chunks, alone or beside others."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_runner_helpers import tiny_configs as tiny

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.models.bert import Bert
from llmstack_model_runner.models.config_values import embedding_size
from llmstack_model_runner.steps.input_batch import InputBatchError
from llmstack_model_runner.steps.pooling import BAD_VECTOR, PooledRows
from llmstack_model_runner.steps.pooling_rows import PoolingRows
from llmstack_types import (
    ModelRunnerConfig,
    ModelRunnerOutput,
    NewRequest,
    PoolingParams,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

transformers = pytest.importorskip("transformers")

NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32]
GPT2 = tiny.GPT2
BERT: dict[str, Any] = tiny.BERT | {"type_vocab_size": 2, "hidden_act": "gelu"}
ROBERTA = BERT | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
BLOCKS_PER_ROW = 8
BLOCK_SIZE = 4


def save(folder: Path, name: str, values: dict[str, Any]) -> Any:
    """A random model of transformers, saved; in evaluation mode."""
    torch.manual_seed(0)
    family = name.removesuffix("Model").removesuffix("ForMaskedLM").removesuffix("LMHead")
    config_class = getattr(transformers, f"{family}Config")
    model = getattr(transformers, name)(config_class(**values)).eval()
    model.save_pretrained(folder)
    return model


def start(folder: Path) -> ModelRunner:
    config = ModelRunnerConfig(str(folder), block_size=BLOCK_SIZE, max_model_len=62, max_num_seqs=16, device="cpu")
    runner = ModelRunner(config)
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(16 * BLOCKS_PER_ROW)
    return runner


class Prompts:
    """Plays the scheduler for pooling requests: each has blocks of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_steps = 0
        self.requests: dict[str, NewRequest] = {}
        self.num_computed: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], params: PoolingParams | None, **sampling: Any) -> None:
        """A prompt to pool, or to complete where `params` is None."""
        sampling_params = NO_TOKENS if params else SamplingParams(temperature=0.0, seed=0, **sampling)
        self.requests[request_id] = NewRequest(
            request_id, list(prompt), len(prompt), sampling_params, pooling_params=params
        )

    def step(self, request_id_to_num_tokens: dict[str, int], removed: tuple[str, ...] = ()) -> ModelRunnerOutput:
        """One step of the given rows."""
        rows, new = [], []
        for request_id, num_tokens in request_id_to_num_tokens.items():
            start = self.num_computed.get(request_id, 0)
            place = list(self.requests).index(request_id)
            is_new = request_id not in self.num_computed
            block_ids = list(range(place * BLOCKS_PER_ROW, (place + 1) * BLOCKS_PER_ROW)) if is_new else []
            rows.append(ScheduledRequest(request_id, start, num_tokens, block_ids))
            new += [self.requests[request_id]] if is_new else []
            self.num_computed[request_id] = start + num_tokens
        self.num_steps += 1
        total = sum(request_id_to_num_tokens.values())
        return self.runner.execute_model(SchedulerOutput(self.num_steps, new, rows, list(removed), total)).result()

    def end(self) -> None:
        """Removes all rows."""
        self.step({}, tuple(self.num_computed))


def as_vector(pooled: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(pooled, dtype="<f4")


def expected(hidden: torch.Tensor, kind: PoolingType, normalize: bool = False) -> npt.NDArray[np.float32]:
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    vector = {
        PoolingType.CLS: hidden[0],
        PoolingType.LAST: hidden[-1],
        PoolingType.MAX: hidden.amax(0),
        PoolingType.MEAN: hidden.mean(0),
        PoolingType.WEIGHTED_MEAN: (hidden * weights).sum(0) / weights.sum(),
    }[kind]
    vector = torch.nn.functional.normalize(vector, dim=-1) if normalize else vector
    return vector.detach().numpy()


def hidden_states(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelRunner]:
    folder = tmp_path_factory.mktemp("gpt2")
    return save(folder, "GPT2LMHeadModel", GPT2), start(folder)


ENCODERS = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "RobertaModel": ROBERTA,
    "RobertaForMaskedLM": ROBERTA,
    "XLMRobertaModel": ROBERTA,
}


@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_gives_the_vectors_of_transformers_alone_and_among_others(architecture: str, tmp_path: Path) -> None:
    reference = save(tmp_path, architecture, ENCODERS[architecture])
    prompts = Prompts(start(tmp_path))
    for number, kind in enumerate(PoolingType):
        prompts.add(f"{kind}", PROMPT[number:], PoolingParams(kind, normalize=True))
    together = prompts.step({f"{kind}": len(PROMPT) - number for number, kind in enumerate(PoolingType)})
    assert together.sampled_token_ids == [[] for _ in PoolingType]
    for number, kind in enumerate(PoolingType):
        vector = as_vector(together.pooled[f"{kind}"])
        np.testing.assert_allclose(vector, expected(hidden_states(reference, PROMPT[number:]), kind, True), atol=1e-5)
        prompts.add(f"alone {kind}", PROMPT[number:], PoolingParams(kind, normalize=True))
        alone = prompts.step({f"alone {kind}": len(PROMPT) - number})
        np.testing.assert_allclose(as_vector(alone.pooled[f"alone {kind}"]), vector, atol=1e-6)


def test_the_spec_of_an_encoder_is_neither_generative_nor_causal(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", BERT)
    runner = start(tmp_path)
    spec = runner.kv_cache_spec()
    assert (spec.embedding_size, spec.is_generative, spec.is_causal) == (32, False, False)
    assert (spec.num_layers, spec.bytes_per_block) == (0, 1)
    assert runner.available_kv_bytes() >= 8 * BLOCKS_PER_ROW


def test_an_encoder_computes_no_chunks_and_no_tokens(tmp_path: Path) -> None:
    save(tmp_path, "BertModel", BERT)
    prompts = Prompts(start(tmp_path))
    prompts.add("p", PROMPT, PoolingParams(PoolingType.MEAN, True))
    prompts.step({"p": 5})
    assert list(prompts.step({"p": 5}).errors) == ["p"]
    prompts.add("c", PROMPT, None)
    with pytest.raises(InputBatchError, match="no output head"):
        prompts.step({"c": len(PROMPT)})


@pytest.mark.parametrize("chunks", [[15], [1, 14], [14, 1], [4, 4, 7], [1] * 15], ids=str)
@pytest.mark.parametrize("kind", PoolingType)
def test_a_decoders_vector_does_not_depend_on_chunks_or_neighbours(
    gpt2: tuple[Any, ModelRunner], kind: PoolingType, chunks: list[int]
) -> None:
    reference, runner = gpt2
    prompts = Prompts(runner)
    prompts.add("c", PROMPT[:6], None, max_tokens=50)
    prompts.add("p", PROMPT, PoolingParams(kind, normalize=False))
    output = prompts.step({"c": 6})
    for num_tokens in chunks:
        assert output.pooled == {}
        output = prompts.step({"c": 1, "p": num_tokens})
        assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 0]
    vector = as_vector(output.pooled["p"])
    np.testing.assert_allclose(vector, expected(hidden_states(reference, PROMPT), kind), atol=1e-5)
    prompts.end()


def test_the_last_tokens_vector_needs_only_the_last_token(gpt2: tuple[Any, ModelRunner]) -> None:
    reference, runner = gpt2
    prompts = Prompts(runner)
    for request_id, kind in (("first", PoolingType.LAST), ("hit", PoolingType.LAST), ("mean", PoolingType.MEAN)):
        prompts.add(request_id, PROMPT, PoolingParams(kind, normalize=False))
    prompts.step({"first": 15})
    row = ScheduledRequest("hit", 12, 3, list(range(BLOCKS_PER_ROW)))  # on the blocks of the first one
    output = runner.execute_model(SchedulerOutput(9, [prompts.requests["hit"]], [row], [], 3)).result()
    whole = expected(hidden_states(reference, PROMPT), PoolingType.LAST)
    np.testing.assert_allclose(as_vector(output.pooled["hit"]), whole, atol=1e-5)
    row = ScheduledRequest("mean", 12, 3, list(range(BLOCKS_PER_ROW)))
    failed = runner.execute_model(SchedulerOutput(10, [prompts.requests["mean"]], [row], [], 3)).result()
    assert list(failed.errors) == ["mean"]
    prompts.step({}, ("first", "hit", "mean"))


@pytest.mark.parametrize("kind", [PoolingType.MEAN, PoolingType.CLS])
def test_a_row_that_begins_again_forgets_what_it_had(gpt2: tuple[Any, ModelRunner], kind: PoolingType) -> None:
    reference, runner = gpt2
    prompts = Prompts(runner)
    prompts.add("p", PROMPT, PoolingParams(kind, normalize=False))
    prompts.step({"p": 9})
    prompts.step({}, ("p",))
    del prompts.num_computed["p"]
    output = prompts.step({"p": 15})
    np.testing.assert_allclose(
        as_vector(output.pooled["p"]), expected(hidden_states(reference, PROMPT), kind), atol=1e-5
    )
    prompts.end()


def test_a_shorter_vector_has_length_1_again() -> None:
    vectors = torch.tensor([[3.0, 4.0, 12.0], [3.0, 4.0, 12.0], [0.0, 0.0, 0.0]])
    params = [PoolingParams(PoolingType.CLS, True, 2), PoolingParams(PoolingType.CLS, False, 2)]
    pooled, errors = PooledRows(["a", "b", "zero"], [*params, PoolingParams(PoolingType.CLS, True)], vectors).to_bytes()
    assert errors == {}
    assert pooled["b"] == struct.pack("<2f", 3.0, 4.0)
    np.testing.assert_allclose(as_vector(pooled["a"]), [0.6, 0.8], atol=1e-7)
    assert as_vector(pooled["zero"]).tolist() == [0.0, 0.0, 0.0]


def test_a_vector_that_is_no_number_fails_alone() -> None:
    vectors = torch.tensor([[1.0, torch.nan], [1.0, 0.0], [1.0, torch.inf]])
    params = [PoolingParams(PoolingType.LAST, True)] * 3
    pooled, errors = PooledRows(["nan", "good", "inf"], params, vectors).to_bytes()
    assert list(pooled) == ["good"]
    assert errors == {"nan": BAD_VECTOR, "inf": BAD_VECTOR}


def test_rows_remember_only_who_is_there() -> None:
    rows = PoolingRows(4)
    rows.set_row(2, PoolingParams(PoolingType.MEAN, True))
    rows.row_to_partial[2] = torch.ones(3)
    assert (len(rows.row_to_params), rows.is_pooling.tolist()) == (1, [False, False, True, False])
    for row in range(4):
        rows.clear_row(row)
    assert (len(rows.row_to_params), rows.row_to_partial, rows.is_pooling.any()) == (0, {}, False)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 8}, 8),
        ({"n_embd": 6}, 6),
        ({"hidden_size": 8, "word_embed_proj_dim": 4}, 4),
        ({"text_config": {"hidden_size": 5}, "hidden_size": 8}, 5),
        ({"hidden_size": "8"}, 0),
        ({}, 0),
    ],
)
def test_the_width_of_vectors_is_the_configurations(config: dict[str, Any], size: int) -> None:
    assert embedding_size(config) == size


def test_norms_of_old_checkpoints_and_heads_of_other_tasks_are_understood() -> None:
    model = load_model_class("BertModel")(BERT, torch.float32, torch.device("cpu"))
    assert isinstance(model, Bert)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): slot
           for name, slot in model.slots().items()}  # fmt: skip
    weights = {name.removeprefix("bert."): torch.zeros(slot.shape) for name, slot in old.items()}
    extra = ("cls.predictions.bias", "bert.pooler.dense.weight", "embeddings.position_ids")
    model.load_weights([*weights.items(), *((name, torch.zeros(2)) for name in extra)])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_size": 30}, "num_attention_heads"),
        ({"hidden_act": "mystery"}, "activation"),
    ],
)
def test_what_the_encoder_cannot_compute_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        load_model_class("BertModel")(BERT | change, torch.float32, torch.device("cpu"))
