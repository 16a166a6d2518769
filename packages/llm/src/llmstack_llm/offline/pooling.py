"""Methods of `LLM` for pooled prompts: vectors, labels and scores."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm.adapters import LoRARequest, LoRARequests
from llmstack_llm.offline.llm_engine import LLMEngine
from llmstack_llm.offline.requests import UseTqdm, one_each, prompt_list
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_llm.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from llmstack_llm.pooling.score_content import ScoreContent, ScoreText, read_score_text
from llmstack_llm.pooling.scoring import plan_scores
from llmstack_llm.requests import PromptInput, RenderedPrompt
from llmstack_types import PoolingParams, PoolingTask, RequestFailedError

ScoreInput = str | Mapping[str, Any]
PoolingParamsInput = PoolingParams | Sequence[PoolingParams] | None


class OfflinePooling(ABC):
    """The methods, over a way to run admitted prompts.

    In all of them `pooling_params` is one for all prompts, or one each, and `truncate_prompt_tokens` cuts longer
    prompts to that many tokens (-1: to what the model takes). They raise InvalidRequestError for any prompt before the
    first is computed, and RequestFailedError where a prompt has no result.
    """

    llm_engine: LLMEngine

    @abstractmethod
    def _run_pooling(self, admitted: Sequence[AdmittedPooling], use_tqdm: UseTqdm) -> list[PoolingRequestOutput]:
        """Outputs in the prompts' order, whatever has become of them."""

    @abstractmethod
    def _render_all(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> list[RenderedPrompt]:
        """A conversation as a prompt, by the model's template."""

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParamsInput = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The raw numbers of each prompt, in the prompts' order.

        `lora_request`: A `LoRARequest` for all, or one or None for each.
        `pooling_task`: `embed`, `classify`, `score`, `token_embed`, `token_classify` or `alignment`; None does what the
          model does.
        """
        all_prompts = prompt_list(prompts)
        params = _one_each(pooling_params, len(all_prompts), truncate_prompt_tokens, pooling_task)
        admit = self.llm_engine.input_processor.admit_pooling
        adapters = self.llm_engine.resolve_adapters(lora_request, len(all_prompts))
        media, tokenizer = self.llm_engine.media, self.llm_engine.tokenizer
        all_prompts = [media.read(one, tokenizer, f"prompts[{index}]") for index, one in enumerate(all_prompts)]
        admitted = [
            dataclasses.replace(admit(prompt, one, param=f"prompts[{index}]"), adapter=adapter)
            for index, (prompt, one, adapter) in enumerate(zip(all_prompts, params, adapters, strict=True))
        ]
        return _checked(self._run_pooling(admitted, use_tqdm))

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParamsInput = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, pooled as the model was trained for, or else as is usual for its kind."""
        outputs = self.encode(
            prompts, pooling_params, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm,
            lora_request=lora_request, pooling_task=PoolingTask.EMBED,
        )  # fmt: skip
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParamsInput = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label of a classifier, for each prompt."""
        outputs = self.encode(
            prompts, pooling_params, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm,
            pooling_task=PoolingTask.CLASSIFY,
        )  # fmt: skip
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well one text fits each of `data_2`, or texts fit one by one.

        A text is a string, or a dict with a `content` of texts and pictures as a message of the user has it.
        A model of one label reads each pair; any other model gives the cosine of the texts' vectors.
        """
        (params,) = _one_each(pooling_params, 1, truncate_prompt_tokens, None)
        processor = self.llm_engine.input_processor
        plan = plan_scores(_texts(data_1, "data_1"), _texts(data_2, "data_2"), processor.limits, params)
        (adapter,) = self.llm_engine.resolve_adapters(lora_request, 1)
        admitted = []
        for one in plan.prompts:
            prompt: Any = one.prompt
            if isinstance(prompt, ScoreContent):
                (prompt,) = self._render_all(prompt.messages, add_generation_prompt=False)
            pooled = processor.admit_pooling(prompt, plan.pooling_params, param=one.param)
            admitted.append(dataclasses.replace(pooled, adapter=adapter))
        outputs = _checked(self._run_pooling(admitted, use_tqdm))
        return [ScoringRequestOutput.from_parts([outputs[index] for index in pair]) for pair in plan.pairs]


def _texts(value: ScoreInput | Sequence[ScoreInput], param: str) -> list[ScoreText]:
    texts = [value] if isinstance(value, str | Mapping) else list(value)
    return [read_score_text(text, f"{param}[{index}]") for index, text in enumerate(texts)]


def _one_each(
    params: PoolingParamsInput, num_prompts: int, truncate_prompt_tokens: int | None, task: PoolingTask | str | None
) -> list[PoolingParams]:
    given = PoolingParams() if params is None else params
    each = one_each("pooling_params", given, PoolingParams, num_prompts, "pooling parameters")
    changes: dict[str, Any] = {"truncate_prompt_tokens": truncate_prompt_tokens, "task": task}
    changes = {name: value for name, value in changes.items() if value is not None}
    return [dataclasses.replace(one, **changes) for one in each]


def _checked(outputs: list[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
    failed = next((index for index, output in enumerate(outputs) if output.finish_reason != "stop"), None)
    if failed is not None:
        raise RequestFailedError(f"prompts[{failed}] gave no numbers: {outputs[failed].finish_reason}")
    return outputs
