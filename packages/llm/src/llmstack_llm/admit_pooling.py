"""The door for pooling requests: their values are checked and resolved here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmstack_llm import request_errors
from llmstack_llm.admit import AdmissionLimits
from llmstack_llm.admit_rules import IntegerRule, check_token_ids
from llmstack_llm.pooling_config import PoolingConfig
from llmstack_types import PoolingParams, PoolingType

_NO_NAMES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class AdmittedPooling:
    """A prompt and its pooling parameters after every check; nothing in the parameters is None but `dimensions`.

    Attributes:
        prompt: The text, or None where token ids were given.
        param: What the user calls the prompt.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    pooling_params: PoolingParams
    param: str = field(default="prompt", compare=False)


def admit_pooling_params(
    params: PoolingParams, limits: AdmissionLimits, config: PoolingConfig, *, param_names: Mapping[str, str] = _NO_NAMES
) -> PoolingParams:
    """Checks the parameters and fills in what the model was trained for: `config`, else the usual of its kind.

    `param_names`: Names of the fields where the user knows them by others.

    Raises:
        InvalidRequestError: Names the first field at fault, or says that the model does not pool.
    """
    if not limits.embedding_size:
        raise request_errors.unsupported_value("model", "this model computes no embeddings")
    dimensions = IntegerRule(1, limits.embedding_size, is_optional=True)
    dimensions.check(param_names.get("dimensions", "dimensions"), params.dimensions)
    if params.normalize is not None and type(params.normalize) is not bool:
        raise request_errors.invalid_type(param_names.get("normalize", "normalize"), "a boolean", params.normalize)
    normalize = params.normalize if params.normalize is not None else config.normalize
    return PoolingParams(
        pooling_type=_pooling_type(params.pooling_type, limits, config),
        normalize=True if normalize is None else normalize,
        dimensions=params.dimensions,
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
) -> AdmittedPooling:
    """Checks and resolves one prompt with its parameters. A prompt may fill the whole context.

    Raises:
        InvalidRequestError: Names the first field at fault: values first, the length last.
    """
    resolved = admit_pooling_params(params, limits, config, param_names=param_names)
    check_token_ids(param, prompt_token_ids, limits.vocab_size)
    if not prompt_token_ids:
        raise request_errors.empty_array(param)
    if len(prompt_token_ids) > limits.max_request_tokens:
        raise request_errors.context_length_exceeded(param, limits.max_request_tokens, len(prompt_token_ids))
    return AdmittedPooling(prompt, list(prompt_token_ids), resolved, param)


def _pooling_type(asked: PoolingType | None, limits: AdmissionLimits, config: PoolingConfig) -> PoolingType:
    if asked is None:
        usual = PoolingType.LAST if limits.is_generative else PoolingType.CLS
        return config.pooling_type or usual
    try:
        return PoolingType(asked)
    except ValueError:
        listed = ", ".join(PoolingType)
        raise request_errors.invalid_value("pooling_type", f"expected one of {listed}") from None
