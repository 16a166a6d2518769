"""A request's id, priority, salt and tenant are checked by name."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.admission.control_fields import check_control_fields
from llmstack_llm.admission.sampling import given_fields
from llmstack_types import InvalidRequestError


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"request_id": 5}, "request_id", "invalid_type"),
        ({"request_id": ""}, "request_id", "string_below_min_length"),
        ({"request_id": "a" * 501}, "request_id", "string_above_max_length"),
        ({"request_id": "\ud800"}, "request_id", "invalid_value"),
        ({"priority": 2**31}, "priority", "integer_above_max_value"),
        ({"priority": -(2**31)}, "priority", "integer_below_min_value"),
        ({"priority": True}, "priority", "invalid_type"),
        ({"cache_salt": None}, "cache_salt", "invalid_type"),
        ({"cache_salt": "a" * 1025}, "cache_salt", "string_above_max_length"),
        ({"tenant": b"a"}, "tenant", "invalid_type"),
        ({"tenant": "a" * 129}, "tenant", "string_above_max_length"),
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_control_fields(**{"request_id": "a", **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_the_ends_of_the_ranges_and_fields_of_the_front_end_are_taken() -> None:
    for priority in (1 - 2**31, 2**31 - 1):
        check_control_fields("a" * 500, priority=priority, cache_salt="a" * 1024, tenant="a" * 128, lora_path=object())


def test_sampling_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        given_fields({"temperature": 0})  # type: ignore[arg-type]
