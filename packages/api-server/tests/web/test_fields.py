"""Types of fields are checked, and a body full of errors costs no more than its first one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from llmstack_server.apis.anthropic.protocol import MessagesRequest
from llmstack_server.apis.batches.objects import BatchRequestBody
from llmstack_server.apis.openai.protocol import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from llmstack_server.apis.responses.protocol import ResponseRequest
from llmstack_server.web import fields
from llmstack_types import InvalidRequestError

MANY = 10_000


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {"bad_words": [1] * MANY}, "bad_words[0]"),
        (CompletionRequest, {"stop_token_ids": [1, *["a"] * MANY]}, "stop_token_ids[1]"),
        (CompletionRequest, {"allowed_token_ids": [1.5] * MANY}, "allowed_token_ids[0]"),
        (ChatCompletionRequest, {"messages": [1] * MANY}, "messages[0]"),
        (ChatCompletionRequest, {"tools": ["a"] * MANY}, "tools[0]"),
        (BatchChatRequest, {"messages": [[1] * MANY] * 9}, "messages[0][0]"),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens[0]"),
        (ResponseRequest, {"include": [1] * MANY}, "include[0]"),
        (MessagesRequest, {"messages": [[]] * MANY}, "messages[0]"),
    ],
)
def test_a_list_ends_at_its_first_error(model: Any, body: dict[str, Any], param: str):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1
    with pytest.raises(InvalidRequestError) as refused:
        fields.parse(model, body)
    assert (refused.value.param, refused.value.code) == (param, "invalid_type")


@pytest.mark.parametrize(
    ("model", "name", "maximum"), [(CompletionRequest, "logit_bias", 1024), (BatchRequestBody, "metadata", 16)]
)
def test_the_entries_of_an_object_are_counted_before_they_are_checked(model: Any, name: str, maximum: int):
    with pytest.raises(InvalidRequestError) as refused:
        fields.parse(model, {name: {str(index): [] for index in range(maximum + 1)}})
    assert (refused.value.param, refused.value.code) == (name, "object_above_max_properties")
    with pytest.raises(InvalidRequestError) as refused:
        fields.parse(model, {name: {str(index): [] for index in range(maximum)}})
    assert refused.value.code == "invalid_type"
