"""The body of llama.cpp's `POST /infill`, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import Decimal, GenerationFields
from llmstack_server.web.peer_fields import PEERS
from llmstack_server.web.unsupported import COMMON, Predicate, one_of
from llmstack_types import RequestOutputKind
from llmstack_types.json_values import JSONObject

MAX_NUM_FILES: Final = 256
MAX_RESPONSE_FIELDS, MAX_FIELD_CHARS = 64, 256
DEFAULT_FILE_NAME: Final = "tmp"
_WHOLE_TEXT: Final = -1


class InfillRequest(GenerationFields):
    """Body of `POST /infill`."""

    input_prefix: str | None = Field(None, description="the text before the gap")
    input_suffix: str | None = Field(None, description="the text after the gap")
    input_extra: list[JSONObject] | None = Field(
        None, description="other files, at most 256: objects of `text` and `filename`"
    )
    prompt: str | None = Field(None, description="how the text in the gap begins")
    n_predict: int | None = Field(None, description="the most tokens of the answer; negative: all that fit")
    n_cmpl: int | None = Field(None, description="texts for the gap; of several a whole answer is an array of objects")
    n_indent: int | None = Field(
        None, description="blanks and tabs with which each line but the first one begins; another line is the end"
    )
    t_max_predict_ms: int | None = Field(
        None, description="milliseconds from the first token on, after which the end of a line is the end"
    )
    n_probs: int | None = Field(None, description="the most likely tokens to report at each position")
    samplers: list[str] | str | None = Field(
        None, description="the samplers that are applied, in their order, by names or letters; those left out are off"
    )
    repeat_penalty: Decimal | None = Field(None, description="other than 1 only together with `repeat_last_n` -1")
    repeat_last_n: int | None = Field(None, description="-1: the penalty counts the whole text")
    return_tokens: bool | None = Field(None, description="whether a whole answer has its token ids")
    response_fields: list[str] | None = Field(
        None, description="the fields of the answer that are sent, at most 64; `a/b` is field b of a"
    )


_NEVER = one_of()
# Fields that the class declares are refused by their own checks.
_DECLARED: Final = frozenset(InfillRequest.model_fields)
# Field to the values that have no effect.
FIELDS: Final[Mapping[str, Predicate]] = {
    **{name: test for name, test in {**COMMON, **PEERS}.items() if name not in _DECLARED},
    "n": one_of(1),
    "best_of": one_of(1),
    "use_beam_search": one_of(False),
    "prompt_logprobs": _NEVER,
    "logprobs": _NEVER,
    "stream_options": one_of({}),
    "return_token_ids": one_of(False),
    "return_progress": one_of(False),
    "timings_per_token": one_of(False),
}


def check_texts(fields: InfillRequest) -> tuple[str, str]:
    """The texts around the gap, both of which llama.cpp requires.

    Raises:
        InvalidRequestError: One is missing, or there are too many files.
    """
    if fields.input_prefix is None:
        raise missing_parameter("input_prefix")
    if fields.input_suffix is None:
        raise missing_parameter("input_suffix")
    files = fields.input_extra or []
    if len(files) > MAX_NUM_FILES:
        raise request_errors.array_too_long("input_extra", MAX_NUM_FILES, len(files))
    for index, file in enumerate(files):
        for name in ("text", "filename"):
            if not isinstance(file.get(name, ""), str):
                raise request_errors.invalid_type(f"input_extra[{index}].{name}", "a string", file[name])
    return fields.input_prefix, fields.input_suffix


def check_response_fields(paths: list[str] | None) -> None:
    """Refuses more, or longer ones, than an answer has: each text of it is searched for all of them.

    Raises:
        InvalidRequestError: Names the first at fault.
    """
    if paths is not None and len(paths) > MAX_RESPONSE_FIELDS:
        raise request_errors.array_too_long("response_fields", MAX_RESPONSE_FIELDS, len(paths))
    for index, path in enumerate(paths or ()):
        if len(path) > MAX_FIELD_CHARS:
            raise request_errors.string_too_long(f"response_fields[{index}]", MAX_FIELD_CHARS, len(path))


def own_fields(fields: InfillRequest) -> JSONObject:
    """The values of llama.cpp's own fields, under the names of `SamplingParams`.

    Raises:
        InvalidRequestError: A penalty that counts a part of the text, or a limit under two names.
    """
    given: JSONObject = {}
    if fields.repeat_penalty is not None and fields.repeat_penalty != 1:
        if fields.repeat_last_n != _WHOLE_TEXT:
            reason = "the penalty counts the whole text here, so it needs 'repeat_last_n': -1"
            raise request_errors.unsupported_value("repeat_penalty", reason)
        given["repetition_penalty"] = fields.repeat_penalty
    if fields.n_predict is not None:
        if fields.max_tokens is not None:
            raise request_errors.invalid_value("max_tokens", "give either 'n_predict' or 'max_tokens'")
        if fields.n_predict >= 0:
            # Of 0 the prompt alone is wanted, in the cache: the one token that this computes is not sent.
            given["max_tokens"] = max(fields.n_predict, 1)
    if fields.n_cmpl is not None:
        given["n"] = fields.n_cmpl
    if fields.n_probs:
        given["logprobs"] = fields.n_probs
    if (fields.n_indent or 0) > 0 or (fields.t_max_predict_ms or 0) > 0:
        given["output_kind"] = RequestOutputKind.DELTA  # to see each line as it ends
    return given
