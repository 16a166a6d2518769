"""Token ids that each completion of a request has, and sends to the engine core."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.admission import sampling as sampling_fields
from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.requests import GenerationRequest
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_types import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "most", "least"),
    [("allowed_token_ids", [65, 66, 67, 68], [65, 66, 67, 68, 69]), ("bad_words", ["b"], ["abcde"])],
)
@pytest.mark.parametrize(("num_prompts", "n"), [(2, 1), (1, 2)])
async def test_ids_that_all_completions_have_are_bounded_with_their_number(
    llm: AsyncLLM, client: FakeEngineCoreClient, monkeypatch: pytest.MonkeyPatch, name: str, most: list[Any],
    least: list[Any], num_prompts: int, n: int,
):  # fmt: skip
    monkeypatch.setattr(sampling_fields, "MAX_REPEATED_IDS", 8)
    await llm.wait_until_ready()

    def requests(value: list[Any]) -> list[GenerationRequest]:
        sampling = GivenSampling({"max_tokens": 1, "n": n, "temperature": 1.0, name: value}, {name: "own"})
        return [GenerationRequest(f"r-{i}", "a", sampling) for i in range(num_prompts)]

    with pytest.raises(InvalidRequestError) as caught:
        await llm.submit(*requests(least))
    assert (caught.value.param, caught.value.code) == ("own", "array_above_max_length")
    assert client.added == []
    async with await llm.submit(*requests(most)) as stream:
        assert [output async for output in stream]
