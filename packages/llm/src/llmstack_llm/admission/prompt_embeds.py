"""Prompts as vectors: one safetensors tensor, read without PyTorch."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_types import InvalidRequestError

PARAM: Final = "prompt_embeds"
MAX_HEADER_BYTES: Final = 4096
_SIZE_BYTES: Final = 8
_DTYPE_TO_NAME: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NAME_TO_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
# Of a number's last byte and the one before: the bits of the exponent, all of which are set where it is not finite.
_EXPONENT_BITS: Final = {"F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0x00)}
_TABLES: Final = {mask: bytes((byte & mask == mask) for byte in range(256)) for mask in (0x00, 0x7C, 0x7F, 0x80)}


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Vectors that passed every check.

    Attributes:
        data: Row by row, in the type of the model.
        token_ids: One placeholder for each vector.
    """

    data: bytes
    token_ids: list[int]

    def fields(self) -> Mapping[str, Any]:
        """The fields of an engine request; the salt, which no other request has, keeps it out of the prefix cache."""
        return {PARAM: self.data, "cache_salt": f"{PARAM}:{uuid.uuid4().hex}"}


def read_prompt_embeds(prompt: object, sampling: CheckedSampling, limits: AdmissionLimits) -> PromptEmbeds | None:
    """The vectors of a prompt with the one key `prompt_embeds`; None for every other prompt.

    Its value is a safetensors file, as bytes or base64, with one tensor `[num_tokens, size]` or with 1 before both.

    Raises:
        InvalidRequestError: They cannot be used as they stand, or not with these sampling fields.
    """
    if not isinstance(prompt, Mapping) or PARAM not in prompt:
        return None
    if not limits.prompt_embeds_size:
        raise request_errors.unsupported_parameter(PARAM, f"'{PARAM}' needs --enable-prompt-embeds")
    if len(prompt) > 1:
        raise _invalid("a prompt has either tokens or vectors")
    for name in ("prompt_logprobs", "truncate_prompt_tokens", "use_beam_search"):
        if sampling.values.get(name) not in (None, False):
            raise request_errors.invalid_value(sampling.names.get(name, name), f"it is not available with '{PARAM}'")
    num_tokens, data = _read_tensor(_file_of(prompt[PARAM]), limits)
    return PromptEmbeds(data, [0] * num_tokens)


def _file_of(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise request_errors.invalid_type(PARAM, "a string in base64", value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("it is not base64") from None


def _read_tensor(file: bytes, limits: AdmissionLimits) -> tuple[int, bytes]:
    """The number of vectors and their bytes."""
    num_header_bytes = int.from_bytes(file[:_SIZE_BYTES], "little")
    start = _SIZE_BYTES + num_header_bytes
    if not 0 < num_header_bytes <= MAX_HEADER_BYTES or len(file) < start:
        raise _invalid("it is not a safetensors file; files of torch.save are not read")
    try:
        header = json.loads(file[_SIZE_BYTES:start])
        header.pop("__metadata__", None)
        ((_, tensor),) = header.items()
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise _invalid("it is not a safetensors file with one tensor") from None
    expected = _DTYPE_TO_NAME.get(limits.dtype)
    if dtype != expected:
        raise _invalid(f"the model's type is {expected}, but the tensor's is {request_errors.echo(dtype)}")
    if not isinstance(shape, list) or set(map(type, shape)) != {int} or shape[-1] != limits.prompt_embeds_size:
        raise _invalid(f"the tensor is not [number of tokens, {limits.prompt_embeds_size}]")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1):
        raise _invalid(f"the tensor is not [number of tokens, {limits.prompt_embeds_size}]")
    num_tokens, data = shape[-2], file[start:]
    if num_tokens < 1:
        raise _invalid("the tensor has no vectors")
    if num_tokens > limits.max_request_tokens:
        raise request_errors.context_length_exceeded(PARAM, limits.max_request_tokens, num_tokens)
    if offsets != [0, len(data)] or len(data) != num_tokens * shape[-1] * _NAME_TO_BYTES[dtype]:
        raise _invalid("the tensor's shape does not fit its size")
    if not _is_finite(data, dtype):
        raise _invalid("the tensor has values that are not finite")
    return num_tokens, data


def _is_finite(data: bytes, dtype: str) -> bool:
    """Whether no number has all bits of its exponent; a few passes in C, without a Python object for each number."""
    size, (last, before) = _NAME_TO_BYTES[dtype], _EXPONENT_BITS[dtype]
    is_last = int.from_bytes(data[size - 1 :: size].translate(_TABLES[last]), "little")
    is_before = int.from_bytes(data[size - 2 :: size].translate(_TABLES[before]), "little")
    return not is_last & is_before


def _invalid(reason: str) -> InvalidRequestError:
    return request_errors.invalid_value(PARAM, reason)
