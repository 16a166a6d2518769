"""Which prompts make the scores of texts, and what `LLM` makes of their numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import load_model_config
from llmstack_llm.offline.media import OfflineMedia
from llmstack_llm.offline.pooling import OfflinePooling
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from llmstack_llm.pooling.prompt import TextPair
from llmstack_llm.pooling.score_content import ScoreContent, read_score_text
from llmstack_llm.pooling.scoring import PairScores, combine, plan_scores
from llmstack_llm.requests import RenderedPrompt
from llmstack_llm.testing import write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import EngineReady, InvalidRequestError, PoolingParams, PoolingTask, RequestFailedError

VECTORS = AdmissionLimits(16, 257, embedding_size=2)
CROSS_ENCODER = AdmissionLimits(16, 257, embedding_size=2, num_labels=1)


def numbers(*values: float, count: int | None = None) -> PoolingOutput:
    return PoolingOutput(array("f", values), count)


def test_a_cross_encoder_reads_each_pair() -> None:
    one_to_many = plan_scores(["q"], ["a", "b"], CROSS_ENCODER)
    assert [one.prompt for one in one_to_many.prompts] == [TextPair("q", "a"), TextPair("q", "b")]
    assert [one.param for one in one_to_many.prompts] == ["data_2[0]", "data_2[1]"]
    assert one_to_many.pairs == [(0,), (1,)]
    assert one_to_many.pooling_params.task is PoolingTask.SCORE
    one_by_one = plan_scores(["q", "r"], ["a", "b"], CROSS_ENCODER)
    assert [one.prompt for one in one_by_one.prompts] == [TextPair("q", "a"), TextPair("r", "b")]


def test_any_other_model_gives_each_text_one_vector() -> None:
    params = PoolingParams(truncate_prompt_tokens=5, use_activation=False)
    plan = plan_scores(["q"], ["a", "b"], VECTORS, params, names=("query", "documents"))
    assert [(one.prompt, one.param) for one in plan.prompts] == [
        ("q", "query[0]"), ("a", "documents[0]"), ("b", "documents[1]"),
    ]  # fmt: skip
    assert plan.pairs == [(0, 1), (0, 2)]
    assert plan.pooling_params == PoolingParams(normalize=True, task=PoolingTask.EMBED, truncate_prompt_tokens=5)
    assert plan_scores(["q", "r"], ["a", "b"], VECTORS).pairs == [(0, 2), (1, 3)]


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_content_is_a_message_of_the_user_or_the_lines_of_its_texts() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    content, picture = read_score_text({"content": texts}, "d[0]"), read_score_text({"content": [part("x")]}, "d[1]")
    assert isinstance(content, ScoreContent)
    assert isinstance(picture, ScoreContent)
    assert content.messages == [{"role": "user", "content": texts}]
    assert [one.param for one in picture.messages[0]["content"]] == ["d[1].content[0]"]
    assert (picture.given, picture.texts) == ([part("x")], [])
    assert plan_scores(["q"], [content], CROSS_ENCODER).prompts[0].prompt == TextPair("q", "a\nb")
    assert [one.prompt for one in plan_scores(["q"], [picture], VECTORS).prompts] == ["q", picture]
    with pytest.raises(InvalidRequestError, match="pairs of texts") as caught:
        plan_scores(["q"], [picture], CROSS_ENCODER)
    assert caught.value.param == "d[1].content[0].type"


@pytest.mark.parametrize(
    ("texts", "limits", "param", "text"),
    [
        (([], ["a"]), VECTORS, "data_1", "empty array"),
        ((["q"], []), VECTORS, "data_2", "empty array"),
        ((["q", "r"], ["a", "b", "c"]), VECTORS, "data_1", "1 text, or as many as 'data_2' has, which are 3"),
        ((["q", "r"], ["a"]), VECTORS, "data_1", "which are 1"),
        ((["q"], ["a"]), AdmissionLimits(16, 257, embedding_size=2, num_labels=3), "model", "Score API: it tells 3"),
    ],
)
def test_what_cannot_be_scored_is_refused(texts: Any, limits: AdmissionLimits, param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        plan_scores(*texts, limits)
    assert caught.value.param == param


def test_a_score_is_a_label_or_a_product() -> None:
    assert combine([numbers(0.25)]) == 0.25
    assert combine([numbers(0.6, 0.8), numbers(1.0, 0.0)]) == pytest.approx(0.6)


def test_late_interaction_sums_the_best_product_of_each_token_of_the_first_text() -> None:
    query, document = numbers(0.6, 0.8, 1.0, 0.0, count=2), numbers(1.0, 0.0, 0.0, 1.0, -1.0, 0.0, count=3)
    assert combine([query, document]) == pytest.approx(0.8 + 1.0)
    assert combine([document, query]) == pytest.approx(1.0 + 0.8 - 0.6)


def test_a_model_of_token_vectors_scores_by_them() -> None:
    limits = AdmissionLimits(16, 257, embedding_size=2, gives_token_vectors=True)
    plan = plan_scores(["q"], ["a", "b"], limits)
    assert plan.pairs == [(0, 1), (0, 2)]
    assert plan.pooling_params == PoolingParams(normalize=True, task=PoolingTask.TOKEN_EMBED)


def test_scores_come_with_their_outputs_in_any_order_and_keep_none_that_is_done() -> None:
    made = PairScores([(0, 1), (0, 2), (3,)])
    assert list(made.add(2, numbers(0.0, 1.0))) == []
    assert list(made.add(3, numbers(0.5))) == [0.5]
    assert list(made.add(0, numbers(0.6, 0.8))) == [pytest.approx(0.8)]
    assert sorted(made._waiting) == [0]
    assert list(made.add(1, numbers(1.0, 0.0))) == [pytest.approx(0.6)]
    assert made.scores == [pytest.approx(0.6), pytest.approx(0.8), 0.5]
    assert not made._waiting


class Offline(OfflinePooling):
    """Numbers made of a prompt's first two tokens, as `LLM` would get them from an engine."""

    def __init__(self, folder: Path, ready: EngineReady) -> None:
        processor = InputProcessor(load_model_config(str(folder)), load_tokenizer(folder))
        processor.set_ready(ready)
        self.llm_engine = SimpleNamespace(  # type: ignore[assignment]
            input_processor=processor, resolve_adapters=lambda _, num: [None] * num, tokenizer=processor.tokenizer,
            media=OfflineMedia(processor.media),
        )  # fmt: skip
        self.num_labels = ready.num_labels
        self.finish_reason = "stop"
        self.admitted: list[AdmittedPooling] = []

    def _render_all(self, messages: Any, *, add_generation_prompt: bool = True) -> list[RenderedPrompt]:
        assert not add_generation_prompt
        text = "".join(part["text"] for part in messages[0]["content"])
        return [RenderedPrompt(f"<{text}>", [ord(text[0]), 1, 2])]

    def _run_pooling(self, admitted: Sequence[AdmittedPooling], use_tqdm: Any) -> list[PoolingRequestOutput]:
        self.admitted = list(admitted)
        return [
            PoolingRequestOutput(str(index), one.prompt, one.prompt_token_ids, self._pool(one), self.finish_reason)
            for index, one in enumerate(admitted)
        ]

    def _pool(self, one: AdmittedPooling) -> PoolingOutput:
        if one.pooling_params.task is PoolingTask.CLASSIFY:
            return PoolingOutput(array("f", [float(len(one.prompt_token_ids))] * self.num_labels))
        angle = float(one.prompt_token_ids[0])
        return PoolingOutput(array("f", [math.cos(angle), math.sin(angle)]))


def offline(tmp_path: Path, num_labels: int) -> Offline:
    ready = EngineReady(64, 16, 128, 257, "float32", "cpu", embedding_size=2, num_labels=num_labels)
    return Offline(write_model_folder(tmp_path / "m"), ready)


def test_labels_come_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    llm = offline(tmp_path, 2)
    outputs = llm.classify(["a", "bcd", [5, 6]], use_tqdm=False)
    assert [output.outputs.probs for output in outputs] == [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0]]
    assert {output.outputs.num_classes for output in outputs} == {2}
    assert [output.prompt for output in outputs] == ["a", "bcd", None]
    assert llm.encode("abc", use_tqdm=False)[0].outputs.tolist() == [3.0, 3.0]  # what the model is for
    with pytest.raises(InvalidRequestError, match="Score API"):
        llm.score("a", "b", use_tqdm=False)


def test_a_cross_encoders_scores_are_those_of_the_pairs(tmp_path: Path) -> None:
    outputs = offline(tmp_path, 1).score("ab", ["c", "def"], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == [3.0, 5.0]
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 5]


def test_scores_of_vectors_are_cosines(tmp_path: Path) -> None:
    llm = offline(tmp_path, 0)
    outputs = llm.score(["a", "b"], ["a", "c"], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx([1.0, math.cos(1)], abs=1e-5)
    assert [len(output.prompt_token_ids) for output in outputs] == [2, 2]
    content = {"content": [{"type": "text", "text": "c"}]}
    (output,) = llm.score(content, {"text": "a"}, use_tqdm=False)
    first, second = llm.admitted
    assert [one.prompt for one in llm.admitted] == ["<c>", "a"]
    angle = first.prompt_token_ids[0] - second.prompt_token_ids[0]
    assert output.outputs.score == pytest.approx(math.cos(angle), abs=1e-5)
    with pytest.raises(InvalidRequestError, match="Classification API"):
        llm.classify("a", use_tqdm=False)


def test_prompts_are_cut_where_that_is_asked_for(tmp_path: Path) -> None:
    llm = offline(tmp_path, 1)
    for call in (llm.encode, llm.embed, llm.classify):
        call(["abcdef", [1, 2, 3, 4]], truncate_prompt_tokens=3, use_tqdm=False)
        assert [len(one.prompt_token_ids) for one in llm.admitted] == [3, 3]
    llm.score("a", "b" * 200, truncate_prompt_tokens=-1, use_tqdm=False)
    assert [len(one.prompt_token_ids) for one in llm.admitted] == [128]


def test_an_argument_that_is_none_is_named(tmp_path: Path) -> None:
    llm = offline(tmp_path, 1)
    for call, param in (
        (lambda: llm.score("a", ["b", 5]), "data_2[1]"),  # type: ignore[list-item]
        (lambda: llm.encode("a", pooling_task="mystery"), "task"),
        (lambda: llm.embed(["a"], [PoolingParams()] * 2), "pooling_params"),
        (lambda: llm.classify(["a", "b" * 129]), "prompts[1]"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.param == param


def test_a_prompt_without_numbers_is_named(tmp_path: Path) -> None:
    llm = offline(tmp_path, 1)
    llm.finish_reason = "error"
    with pytest.raises(RequestFailedError, match=r"prompts\[0\] gave no numbers: error"):
        llm.score("a", "b", use_tqdm=False)
