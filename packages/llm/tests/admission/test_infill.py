"""Admission of the sampler `infill`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.sampling import check_sampling
from llmstack_types import InvalidRequestError

LIMITS = AdmissionLimits(max_model_len=100, vocab_size=1000)


def test_infill_is_bounded_by_its_candidates() -> None:
    assert check_sampling({"infill": True, "top_k": 256}, LIMITS).values["infill"]
    for fields in ({}, {"top_k": 0}, {"top_k": 257}):
        with pytest.raises(InvalidRequestError, match="must be from 1 to 256") as caught:
            check_sampling({"infill": True, **fields}, LIMITS)
        assert caught.value.param == "top_k"
    with pytest.raises(InvalidRequestError, match="needs the bytes of tokens") as caught:
        check_sampling({"infill": True, "top_k": 4}, replace(LIMITS, has_token_bytes=False), {"infill": "samplers"})
    assert caught.value.param == "samplers"
