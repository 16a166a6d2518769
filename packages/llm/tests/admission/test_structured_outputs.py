"""Admission of constraints on the output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.sampling import GivenSampling, check_sampling
from llmstack_llm.admission.structured_outputs import (
    ConstraintAdmission,
    StructuredOutputsConfig,
    normal_constraint,
    read_structured_outputs_config,
)
from llmstack_llm.engine_args import EngineArgs, EngineArgsError
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.requests import GenerationRequest
from llmstack_structured_output import ConstraintChecker
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID, write_byte_tokenizer
from llmstack_types import InvalidRequestError, StructuredOutputsParams, TenantLimitError

NAMES = {"structured_outputs": "format", "structured_outputs.json": "format.schema"}


def params(**constraint: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**constraint)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ConstraintAdmission]:
    write_byte_tokenizer(tmp_path)
    return lambda **config: ConstraintAdmission(tmp_path, [EOS_TOKEN_ID], StructuredOutputsConfig(**config))


def test_equal_constraints_get_one_form() -> None:
    assert normal_constraint(params(json={"type": "object"}), {}, NAMES) == params(json='{"type": "object"}')
    assert normal_constraint(params(choice=["a"]), {}, NAMES) == params(choice=("a",))


@pytest.mark.parametrize(
    ("made", "param", "code"),
    [
        (params(), "format", "invalid_value"),
        (params(json={}, regex="a"), "format", "invalid_value"),
        (params(json=5), "format.schema", "invalid_value"),
        (params(json={"x": {1}}), "format.schema", "invalid_json_schema"),
        (params(regex="\ud800"), "structured_outputs.regex", "invalid_value"),
        (params(choice="abc"), "structured_outputs.choice", "invalid_value"),
        (params(choice=[1]), "structured_outputs.choice", "invalid_value"),
        (params(json_object="yes"), "structured_outputs.json_object", "invalid_value"),
        ({"regex": "a"}, "format", "invalid_type"),
    ],
    ids=str,
)
def test_what_has_no_form_is_refused_under_the_users_name_for_it(made: object, param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normal_constraint(made, {}, NAMES)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert param in caught.value.message


def test_a_constraint_excludes_allowed_tokens() -> None:
    limits = AdmissionLimits(max_model_len=100, vocab_size=1000)
    given = {"structured_outputs": params(regex="a"), "allowed_token_ids": [1]}
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(given, limits, NAMES)
    assert (caught.value.param, caught.value.code) == ("allowed_token_ids", "invalid_value")
    allowed = check_sampling({"allowed_token_ids": [1]}, limits)
    with pytest.raises(InvalidRequestError, match="'format'") as caught:
        allowed.with_constraint(params(regex="a"), NAMES)
    assert caught.value.param == "allowed_token_ids"


async def test_a_constraint_is_compiled_here_or_in_a_process_of_its_own_with_one_result(
    make: Callable[..., ConstraintAdmission],
) -> None:
    admission = make()
    good, bad = params(json='{"type": "object"}'), params(json='{"type": "objekt"}')
    try:
        assert admission.check(good, BYTE_VOCAB_SIZE, NAMES) == good
        assert await admission.check_async(good, BYTE_VOCAB_SIZE, NAMES) == good
        with pytest.raises(InvalidRequestError) as here:
            admission.check(bad, BYTE_VOCAB_SIZE, NAMES)
        with pytest.raises(InvalidRequestError) as there:
            await admission.check_async(bad, BYTE_VOCAB_SIZE, NAMES)
    finally:
        await admission.shutdown()
    assert here.value.message == there.value.message
    assert "'format.schema'" in here.value.message
    assert (here.value.param, here.value.code) == ("format.schema", "invalid_json_schema")


def test_blanks_are_forbidden_to_all_where_the_configuration_says_so(make: Callable[..., ConstraintAdmission]) -> None:
    made = make(disable_any_whitespace=True).check(params(json_object=True), BYTE_VOCAB_SIZE, NAMES)
    assert made == params(json_object=True, disable_any_whitespace=True)


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (True, True), (False, False)])
def test_the_letter_of_json_schema_is_the_default_of_a_server_by_its_setting(
    make: Callable[..., ConstraintAdmission], asked: bool | None, expected: bool
) -> None:
    constraint = params(json_object=True, disable_additional_properties=asked)
    made = make(disable_additional_properties=False).check(constraint, BYTE_VOCAB_SIZE, NAMES)
    assert made.disable_additional_properties is expected
    assert make().check(constraint, BYTE_VOCAB_SIZE, NAMES) == constraint


def test_without_a_tokenizer_a_constraint_is_refused() -> None:
    admission = ConstraintAdmission(None, [1], StructuredOutputsConfig())
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        admission.check(params(regex="a"), BYTE_VOCAB_SIZE, NAMES)


def test_a_configuration_comes_as_a_mapping_or_as_json() -> None:
    assert read_structured_outputs_config(None) == StructuredOutputsConfig()
    expected = StructuredOutputsConfig("guidance", disable_any_whitespace=True)
    assert read_structured_outputs_config({"backend": "guidance", "disable_any_whitespace": True}) == expected
    assert read_structured_outputs_config('{"backend": "guidance", "disable_any_whitespace": true}') == expected


def test_the_names_of_other_compilers_are_known_with_their_older_options() -> None:
    assert read_structured_outputs_config({"backend": "xgrammar"}) == StructuredOutputsConfig("xgrammar")
    expected = StructuredOutputsConfig("outlines", disable_fallback=True, disable_any_whitespace=True)
    given = {"backend": "outlines:no-fallback,disable-any-whitespace"}
    assert read_structured_outputs_config(given) == expected


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("{", "not valid JSON"),
        ("[]", "object"),
        ({"backend": "xgrammer"}, "only auto, guidance, llguidance, xgrammar"),
        ({"backend": "xgrammar:fast"}, "'fast' is not available"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning"),
        ({"reasoning_parser": "qwen3"}, "is an option of its own"),
        ({"disable_any_whitespace": "yes"}, "bool"),
    ],
)
def test_another_configuration_is_refused_at_the_start(value: Any, word: str) -> None:
    with pytest.raises(EngineArgsError, match=word):
        EngineArgs(model="m", structured_outputs_config=value)


async def test_a_constraint_is_compiled_on_the_account_of_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []

    async def check(self: ConstraintChecker, params: StructuredOutputsParams, tenant: str = "") -> None:
        tenants.append(tenant)
        if tenant == "greedy":
            raise TenantLimitError("Later.", wait_s=3.0)

    monkeypatch.setattr(ConstraintChecker, "check", check)
    model = ModelConfig("m", tmp_path, "GPT2LMHeadModel", "gpt2", 100, BYTE_VOCAB_SIZE, tokenizer_path=tmp_path)
    processor = InputProcessor(model, None)
    given = {"structured_outputs": StructuredOutputsParams(regex="a"), "max_tokens": 1}
    sampling = processor.check_sampling(GivenSampling(given))
    with pytest.raises(TenantLimitError):
        await processor.admit_async(GenerationRequest("r", [1, 2], sampling, tenant="greedy"), sampling)
    await processor.admit_async(GenerationRequest("r", [1, 2], sampling, tenant="other"), sampling)
    assert tenants == ["greedy", "other"]
