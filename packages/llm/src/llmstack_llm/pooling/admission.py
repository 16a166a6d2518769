"""Validation of pooling requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import IntegerRule, check_placeholders, check_token_ids
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.model.pooling_config import PoolingConfig
from llmstack_llm.requests import Adapter
from llmstack_types import MediaItem, PoolingParams, PoolingTask, PoolingType

MAX_NUMBERS_PER_PROMPT = 1 << 23
"""Numbers of one prompt with a vector for each token: 32 MiB, of which several fit a message."""
_NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class AdmittedPooling:
    """A prompt and its pooling parameters after every check.

    Nothing in the parameters is None but `dimensions`, `second_text_start` and, with numbers for each token,
    `pooling_type`; there is nothing left to cut.

    Attributes:
        prompt: The text, or None where token ids or two texts were given.
        param: The user's name of the prompt.
        adapter: The adapter to use; None is the base model.
        media, placed, release: As of an `AdmittedRequest`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    pooling_params: PoolingParams
    param: str = field(default="prompt", compare=False)
    adapter: Adapter | None = None
    media: tuple[MediaItem, ...] = ()
    placed: tuple[PlacedMedia, ...] = ()
    release: Callable[[], None] | None = field(default=None, compare=False)

    def adapter_fields(self) -> dict[str, Any]:
        """The fields of an `EngineCoreRequest` that name the adapter."""
        return {} if self.adapter is None else self.adapter.fields()


def admit_pooling_params(
    params: PoolingParams, limits: AdmissionLimits, config: PoolingConfig, *, param_names: Mapping[str, str] = _NO_NAMES
) -> PoolingParams:
    """Checks the parameters and fills in what the model was trained for: `config`, else the usual of its kind.

    How a prompt is cut is not looked at: `pooling_prompt` has done so.

    `param_names`: Names of the fields where the user knows them by others.

    Raises:
        InvalidRequestError: Names the first field at fault, or says that the model does not do this.
    """

    def name(field_name: str) -> str:
        return param_names.get(field_name, field_name)

    task = _task(params.task, limits, name("task"))
    IntegerRule(1, limits.embedding_size, is_optional=True).check(name("dimensions"), params.dimensions)
    if params.dimensions is not None and params.dimensions not in (
        limits.matryoshka_dimensions or (params.dimensions,)
    ):
        listed = ", ".join(map(str, limits.matryoshka_dimensions))
        raise request_errors.invalid_value(name("dimensions"), f"this model was trained for {listed}")
    for field_name in ("normalize", "use_activation"):
        value = getattr(params, field_name)
        if value is not None and type(value) is not bool:
            raise request_errors.invalid_type(name(field_name), "a boolean", value)
    if not task.gives_vectors:
        _refuse_vector_fields(params, name)
        normalize = None
    else:
        normalize = params.normalize if params.normalize is not None else params.use_activation
        normalize = normalize if normalize is not None else config.normalize
    return PoolingParams(
        pooling_type=_pooling_type(params.pooling_type, task, limits, config, name("pooling_type")),
        normalize=True if normalize is None else normalize,
        dimensions=params.dimensions,
        task=task,
        use_activation=params.use_activation is not False,
        second_text_start=params.second_text_start,
    )


def admit_pooling(
    prompt: str | None,
    prompt_token_ids: list[int],
    params: PoolingParams,
    limits: AdmissionLimits,
    config: PoolingConfig,
    *,
    param: str = "prompt",
    param_names: Mapping[str, str] = _NO_NAMES,
    placed: tuple[PlacedMedia, ...] = (),
) -> AdmittedPooling:
    """Checks and resolves one prompt with its parameters. A prompt may fill the whole context.

    `placed`: Its pictures and the like, counted and not decoded.

    Raises:
        InvalidRequestError: Names the first field at fault: values first, the length last.
    """
    resolved = admit_pooling_params(params, limits, config, param_names=param_names)
    check_token_ids(param, prompt_token_ids, limits.vocab_size, num_checked=limits.max_request_tokens)
    if not prompt_token_ids:
        raise request_errors.empty_array(param)
    if not placed:
        check_placeholders(param, prompt_token_ids, limits.placeholders)
    _check_second_text_start(resolved.second_text_start, len(prompt_token_ids), limits)
    if len(prompt_token_ids) > limits.max_request_tokens:
        raise request_errors.context_length_exceeded(param, limits.max_request_tokens, len(prompt_token_ids))
    if resolved.task is not None and resolved.task.is_per_token:
        max_tokens = MAX_NUMBERS_PER_PROMPT // max(limits.embedding_size, limits.num_labels, limits.alignment_size)
        if len(prompt_token_ids) > max_tokens:
            reason = f"with numbers for each token, prompts of this model have at most {max_tokens} tokens"
            raise request_errors.invalid_value(param, reason)
    return AdmittedPooling(prompt, list(prompt_token_ids), resolved, param, placed=placed)


def _task(asked: PoolingTask | None, limits: AdmissionLimits, name: str) -> PoolingTask:
    if not limits.embedding_size:
        raise request_errors.pooling_not_supported("Embeddings", "it computes no embeddings")
    if asked is None:
        of_labels = PoolingTask.TOKEN_CLASSIFY if limits.labels_tokens else PoolingTask.CLASSIFY
        of_vectors = PoolingTask.TOKEN_EMBED if limits.gives_token_vectors else PoolingTask.EMBED
        return of_labels if limits.num_labels else of_vectors
    try:
        task = PoolingTask(asked)
    except ValueError:
        raise request_errors.invalid_value(name, f"expected one of {', '.join(PoolingTask)}") from None
    if task is PoolingTask.EMBED and limits.gives_token_vectors:
        reason = "it gives a vector for each token: the task is token_embed"
        raise request_errors.pooling_not_supported("Embeddings", reason)
    if task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY) and not limits.num_labels:
        raise request_errors.pooling_not_supported("Classification", "it has no labels")
    if task in (PoolingTask.CLASSIFY, PoolingTask.SCORE) and limits.labels_tokens:
        raise request_errors.pooling_not_supported("Classification", "it labels tokens: the task is token_classify")
    if task is PoolingTask.ALIGNMENT and not limits.alignment_size:
        raise request_errors.pooling_not_supported("Alignment", "it has no heads that follow sound")
    if task is PoolingTask.SCORE and limits.num_labels != 1:
        raise request_errors.pooling_not_supported(
            "Score", f"a cross encoder has 1 label, and it has {limits.num_labels}"
        )
    return PoolingTask.CLASSIFY if task is PoolingTask.SCORE else task


def _refuse_vector_fields(params: PoolingParams, name: Callable[[str], str]) -> None:
    for field_name in ("dimensions", "normalize", "pooling_type"):
        if getattr(params, field_name) is not None:
            raise request_errors.invalid_value(name(field_name), "it is about vectors, and labels are asked for")


def _pooling_type(
    asked: PoolingType | None, task: PoolingTask, limits: AdmissionLimits, config: PoolingConfig, name: str
) -> PoolingType | None:
    usual = PoolingType.LAST if limits.is_causal else PoolingType.CLS
    if task is PoolingTask.CLASSIFY:
        return limits.label_pooling or usual  # whatever the folder says of vectors: heads are trained on this one
    if task.is_per_token:
        if asked is not None:
            raise request_errors.invalid_value(name, "there is nothing to pool, since each token has its vector")
        return None
    if asked is None:
        return config.pooling_type or usual
    try:
        return PoolingType(asked)
    except ValueError:
        listed = ", ".join(PoolingType)
        raise request_errors.invalid_value(name, f"expected one of {listed}") from None


def _check_second_text_start(start: int | None, num_tokens: int, limits: AdmissionLimits) -> None:
    if start is not None and limits.num_token_types < 2:
        raise request_errors.invalid_value("second_text_start", "this model does not tell the texts of a pair apart")
    IntegerRule(0, num_tokens, is_optional=True).check("second_text_start", start)
