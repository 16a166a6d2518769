"""The shared data is plain: immutable, of the standard library, with the defaults users know."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import StrEnum
from typing import Any

import pytest

import llmstack_types
from llmstack_types import (
    BlockEviction,
    Control,
    DiskCacheStats,
    EncoderStats,
    EncoderWork,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    LLMStackError,
    LoRAIdentity,
    Operation,
    PrefixMedia,
    RepetitionDetectionParams,
    RequestEvent,
    RequestNote,
    RequestProgress,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    SessionReturn,
    ShadowFigures,
    ShadowReport,
    StepPhases,
    StepRecord,
    StepRecording,
    StructuredOutputsParams,
    TokenLogprobs,
)
from llmstack_types.vocabulary import LoggingLevel, LogLevel, words_of

PUBLIC = {name: getattr(llmstack_types, name) for name in llmstack_types.__all__}
DATACLASSES = [value for value in PUBLIC.values() if is_dataclass(value)]
NAMED_TUPLES = [
    BlockEviction, DiskCacheStats, EncoderStats, EncoderWork, EngineCoreOutput, EngineCoreOutputs, KVTransferParams,
    LoRAIdentity, PrefixMedia, RequestEvent, RequestNote, RequestProgress, ScheduledRequest, SchedulerStats,
    SessionReturn, ShadowFigures, ShadowReport, StepPhases, StepRecord, StepRecording, TokenLogprobs,
]  # fmt: skip

# https://docs.vllm.ai: `SamplingParams`. Two fields differ in type only: our tuples are immutable.
VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "extra_args": None,
    "structured_outputs": None,
    "repetition_detection": None,
    "logprob_token_ids": None,
    "thinking_token_budget": None,
}
# vLLM has the first four elsewhere, and the last three not in public.
OWN_FIELDS = ("best_of", "use_beam_search", "length_penalty", "early_stopping", "typical_p", "bad_words_token_ids",
              "stream_interval", "truncate_prompt_tokens", "truncation_side", "kept_special_tokens",
              "thinking_tags", "no_repeat_ngram_size", "top_n_sigma", "forced_bos_token_id",
              "forced_eos_token_id", "infill")  # fmt: skip


def test_the_defaults_of_sampling_params_are_vllms() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert {field.name for field in fields(params)} - set(VLLM_DEFAULTS) == {"output_kind", *OWN_FIELDS}
    assert params.output_kind == "cumulative"


def test_importing_takes_the_standard_library_only() -> None:
    script = (
        "import sys; from llmstack_types import *; import llmstack_types.traces, llmstack_types.vocabulary\n"
        "print({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - "
        "{'__main__', 'llmstack_types', 'sitecustomize', 'usercustomize'})"
    )
    # -S: no site packages and none of their start-up hooks; the path of the sources is handed over.
    path = next(entry for entry in llmstack_types.__path__).rpartition("/")[0]
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({path!r})\n{script}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("cls", DATACLASSES, ids=lambda cls: cls.__name__)
def test_dataclasses_are_frozen_and_slotted(cls: Any) -> None:
    assert cls.__dataclass_params__.frozen
    assert not hasattr(cls, "__dict__") or "__slots__" in vars(cls)
    instance = object.__new__(cls)
    with pytest.raises((FrozenInstanceError, AttributeError)):
        setattr(instance, fields(cls)[0].name, 1)


@pytest.mark.parametrize("cls", NAMED_TUPLES, ids=lambda cls: cls.__name__)
def test_named_tuples_are_immutable(cls: Any) -> None:
    instance = cls(*[None] * len(cls._fields))
    with pytest.raises(AttributeError):
        setattr(instance, cls._fields[0], 1)


def test_everything_public_is_data_or_an_error() -> None:
    for name, value in PUBLIC.items():
        is_data = value in DATACLASSES or value in NAMED_TUPLES or issubclass(value, StrEnum) or value is Control
        assert is_data or issubclass(value, LLMStackError), name


def test_control_is_a_set_of_operations_with_numbers_of_their_own() -> None:
    operations = {name: value for name, value in vars(Control).items() if not name.startswith("__")}
    assert all(isinstance(operation, Operation) for operation in operations.values())
    assert [operation.name.upper() for operation in operations.values()] == list(operations)
    assert len({operation.number for operation in operations.values()}) == len(operations)


def test_stop_strings_have_one_form() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_finish_reasons_are_those_of_openai_and_vllm() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]


def test_an_invalid_request_is_a_value_error_that_names_the_field() -> None:
    error = InvalidRequestError("Bad.", param="n", code="integer_above_max_value")
    assert isinstance(error, ValueError)
    assert (str(error), error.message, error.param, error.code) == ("Bad.", "Bad.", "n", "integer_above_max_value")


def test_the_usage_of_the_cache_is_a_share() -> None:
    assert SchedulerStats().kv_cache_usage == 0.0
    assert SchedulerStats(num_free_blocks=3, num_blocks=4).kv_cache_usage == 0.25


def test_a_step_without_rows_is_empty() -> None:
    assert SchedulerOutput(1, removed_request_ids=["r"]).is_empty()
    assert not SchedulerOutput(1, scheduled_requests=[ScheduledRequest("r", 0, 1, [0])]).is_empty()


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    assert dir(llmstack_types) == llmstack_types.__all__
    with pytest.raises(AttributeError, match=r"'llmstack_types' has no attribute 'Sampling'"):
        llmstack_types.Sampling  # noqa: B018 - looking it up is what raises


def test_importing_the_vocabulary_loads_no_other_module_of_the_package() -> None:
    script = "import sys, llmstack_types.vocabulary; print(sorted(n for n in sys.modules if n.startswith('llmstack_')))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "['llmstack_types', 'llmstack_types.vocabulary']"


def test_a_set_of_words_may_contain_another() -> None:
    assert words_of(LogLevel) == (*words_of(LoggingLevel), "trace")


@pytest.mark.parametrize(
    ("named", "can_stop"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"min_tokens": 8}, False),
        ({"min_tokens": 7}, True),
        ({"ignore_eos": True, "stop": "end"}, True),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, True),
        ({"ignore_eos": True, "structured_outputs": StructuredOutputsParams(regex="a")}, True),
        ({"ignore_eos": True, "repetition_detection": RepetitionDetectionParams(1, 8, 4)}, True),
    ],
)
def test_a_completion_may_stop_before_its_limit_where_something_can_end_it(named: dict[str, Any], can_stop: bool):
    assert RequestProgress.of(3, 2, SamplingParams(max_tokens=8, **named)) == (3, 2, 8, can_stop)
