"""Prompts of vectors in place of tokens, which become items of the kind `embeds`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.rules import check_placeholders, check_token_ids
from llmstack_llm.admission.sampling import CheckedSampling
from llmstack_types import InvalidRequestError, MediaItem, MediaMemory

PARAM: Final = "prompt_embeds"
IDS, MASK, TEXT = "prompt_token_ids", "prompt_is_token_ids", "prompt"
PLACEHOLDER: Final = 0
MAX_HEADER_BYTES: Final = 4096
_KIND: Final = "embeds"
_SIZE_BYTES: Final = 8
_DTYPE_TO_NAME: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NAME_TO_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
# Of a number's last byte and the one before: the bits of the exponent, all of which are set where it is not finite.
_EXPONENT_BITS: Final = {"F32": (0x7F, 0x80), "BF16": (0x7F, 0x80), "F16": (0x7C, 0x00)}
_TABLES: Final = {mask: bytes((byte & mask == mask) for byte in range(256)) for mask in (0x00, 0x7C, 0x7F, 0x80)}


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Vectors that passed every check, and the tokens beside them.

    Attributes:
        text: The text that is shown as the prompt, if any.
        token_ids: The prompt; `PLACEHOLDER` where it has vectors.
        media: The vectors, as items.
    """

    text: str | None
    token_ids: list[int]
    media: tuple[MediaItem, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as it was given, before its shape and type are compared with the model's."""

    dtype: object  # as safetensors names it
    shape: Sequence[object]
    data: bytes


def read_prompt_embeds(prompt: object, sampling: CheckedSampling, limits: AdmissionLimits) -> PromptEmbeds | None:
    """The vectors of a prompt in vLLM's form with the key `prompt_embeds`; None for every other prompt.

    Its value is a tensor `[num_tokens, size]` or with 1 before both: of PyTorch, or a safetensors file, as bytes or
    base64, with it alone. With `prompt_token_ids` and `prompt_is_token_ids`, both of the same length, tokens stand
    where the latter is true, and the rows of the tensor there are not used. `prompt` is only shown.

    Raises:
        InvalidRequestError: They cannot be used as they stand, or not with these sampling fields.
    """
    if not isinstance(prompt, Mapping) or PARAM not in prompt:
        return None
    if not limits.prompt_embeds_size:
        raise request_errors.unsupported_parameter(PARAM, f"'{PARAM}' needs --enable-prompt-embeds")
    for key, value in prompt.items():
        if key not in (PARAM, IDS, MASK, TEXT) and value is not None:
            raise request_errors.unsupported_parameter(request_errors.echo(key), f"'{request_errors.echo(key)}'")
    text = prompt.get(TEXT)
    if text is not None and not isinstance(text, str):
        raise request_errors.invalid_type(TEXT, "a string", text)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if sampling.values.get(name) not in (None, False):
            raise request_errors.invalid_value(sampling.names.get(name, name), f"it is not available with '{PARAM}'")
    num_tokens, tensor = _checked(_tensor_of(prompt[PARAM]), limits)
    token_ids, runs = _tokens_beside(prompt, num_tokens, limits)
    return PromptEmbeds(text, token_ids, tuple(_items(runs, tensor, limits)))


def read_vectors(value: object, limits: AdmissionLimits, param: str) -> tuple[int, bytes, bytes]:
    """The number, the digest and the bytes of vectors that stand in place of a picture.

    `value`: A tensor as for `read_prompt_embeds`.

    Raises:
        InvalidRequestError: They cannot be used; `param` names them.
    """
    try:
        num_vectors, tensor = _checked(_tensor_of(value), limits)
        if num_vectors > limits.max_item_vectors:
            raise _invalid(f"there are more than {limits.max_item_vectors} vectors, the most that one item has")
        if not _is_finite(tensor.data, _DTYPE_TO_NAME[limits.dtype]):
            raise _invalid("the tensor has values that are not finite")
    except InvalidRequestError as error:
        message = error.message.replace(f"'{PARAM}'", f"'{param}'")
        raise InvalidRequestError(message, param=param, code=error.code) from error
    return num_vectors, digest_of("image", limits.dtype, limits.prompt_embeds_size, tensor.data), tensor.data


def digest_of(kind: str, dtype: str, width: int, data: bytes | memoryview) -> bytes:
    """The name of given vectors: a digest of all parts, each behind its length, so that no two lists read the same."""
    digest = hashlib.sha256()
    for part in (kind.encode(), dtype.encode(), str(width).encode(), data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _items(runs: Sequence[range], tensor: _Tensor, limits: AdmissionLimits) -> Iterator[MediaItem]:
    """Items of at most so many vectors as one may have, each with its own bytes."""
    width, name = limits.prompt_embeds_size, _DTYPE_TO_NAME[limits.dtype]
    row_bytes = width * _NAME_TO_BYTES[name]
    for run in runs:
        for start in range(run.start, run.stop, limits.max_item_vectors):
            count = min(limits.max_item_vectors, run.stop - start)
            data = tensor.data[start * row_bytes : (start + count) * row_bytes]
            if not _is_finite(data, name):
                raise _invalid("the tensor has values that are not finite")
            digest = digest_of(_KIND, limits.dtype, width, data)
            yield MediaItem(digest, _KIND, start, count, memory=MediaMemory(len(data), data=data))


def _tokens_beside(
    prompt: Mapping[str, Any], num_tokens: int, limits: AdmissionLimits
) -> tuple[list[int], Sequence[range]]:
    """The prompt's ids, and where it has vectors."""
    token_ids, mask = prompt.get(IDS), prompt.get(MASK)
    if token_ids is None and mask is None:
        return [PLACEHOLDER] * num_tokens, [range(num_tokens)]
    for name, value, kind in ((IDS, token_ids, int), (MASK, mask, bool)):
        if not isinstance(value, list | tuple) or not set(map(type, value)) <= {kind}:
            what = "integers" if kind is int else "booleans"
            raise request_errors.invalid_type(name, f"an array of {what} beside '{PARAM}'", value)
        if len(value) != num_tokens:
            raise request_errors.invalid_value(name, f"it has {len(value)} entries for {num_tokens} vectors")
    whole = [one if is_token else PLACEHOLDER for one, is_token in zip(token_ids or (), mask or (), strict=True)]
    check_token_ids(IDS, whole, limits.vocab_size)
    check_placeholders(IDS, whole, limits.placeholders)
    runs, start = [], 0
    for is_token, places in groupby(mask or ()):
        end = start + sum(1 for _ in places)
        runs += [] if is_token else [range(start, end)]
        start = end
    return whole, runs


def _tensor_of(value: object) -> _Tensor:
    torch = sys.modules.get("torch")  # a tensor of PyTorch comes from who has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        dtype = _DTYPE_TO_NAME.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype))
        return _Tensor(dtype, list(tensor.shape), tensor.flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, bytes):
        return _read_file(value)
    if not isinstance(value, str):
        raise request_errors.invalid_type(PARAM, "a string in base64", value)
    try:
        return _read_file(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError):
        raise _invalid("it is not base64") from None


def _read_file(file: bytes) -> _Tensor:
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
    data = file[start:]
    if not isinstance(shape, list) or offsets != [0, len(data)]:
        raise _invalid("the tensor's shape does not fit its size")
    return _Tensor(dtype, shape, data)


def _checked(tensor: _Tensor, limits: AdmissionLimits) -> tuple[int, _Tensor]:
    """The number of vectors, and the tensor that has them in the type of the model."""
    expected, shape = _DTYPE_TO_NAME.get(limits.dtype), tensor.shape
    if tensor.dtype != expected:
        raise _invalid(f"the model's type is {expected}, but the tensor's is {request_errors.echo(tensor.dtype)}")
    is_matrix = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    num_tokens = shape[-2] if is_matrix else None
    if set(map(type, shape)) != {int} or not isinstance(num_tokens, int) or shape[-1] != limits.prompt_embeds_size:
        raise _invalid(f"the tensor is not [number of tokens, {limits.prompt_embeds_size}]")
    if num_tokens < 1:
        raise _invalid("the tensor has no vectors")
    if num_tokens > limits.max_request_tokens:
        raise request_errors.context_length_exceeded(PARAM, limits.max_request_tokens, num_tokens)
    if len(tensor.data) != math.prod((num_tokens, limits.prompt_embeds_size, _NAME_TO_BYTES[str(tensor.dtype)])):
        raise _invalid("the tensor's shape does not fit its size")
    return num_tokens, tensor


def _is_finite(data: bytes, dtype: str) -> bool:
    """Whether no number has all bits of its exponent; a few passes in C, without a Python object for each number."""
    size, (last, before) = _NAME_TO_BYTES[dtype], _EXPONENT_BITS[dtype]
    is_last = int.from_bytes(data[size - 1 :: size].translate(_TABLES[last]), "little")
    is_before = int.from_bytes(data[size - 2 :: size].translate(_TABLES[before]), "little")
    return not is_last & is_before


def _invalid(reason: str) -> InvalidRequestError:
    return request_errors.invalid_value(PARAM, reason)
