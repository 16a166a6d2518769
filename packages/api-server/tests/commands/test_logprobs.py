"""`llmstack logprobs` without a server: answers that the log of an engine has."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmstack_demo_model
from llmstack_llm import LLM, SamplingParams
from llmstack_server.commands.logprobs import Wanted, answer_of_log, recompute

MODEL = Path(llmstack_demo_model.__file__).parent / "model"


@pytest.mark.parametrize("num_top", [0, 2])
def test_an_answer_may_fill_the_context_or_have_one_token(tmp_path: Path, num_top: int) -> None:
    log = tmp_path / "steps.log"
    with LLM(str(MODEL), record_steps=str(log), max_logprobs=2) as llm:
        longest = llm.llm_engine.ready.max_model_len
        prompt = llm.llm_engine.tokenizer.encode("Once")
        params = [
            SamplingParams(temperature=1.0, seed=3, max_tokens=number, ignore_eos=True, logprobs=num_top)
            for number in (longest - len(prompt), 1)
        ]
        served = llm.generate([{"prompt_token_ids": prompt}] * 2, params, use_tqdm=False)
    for answer in served:
        header, parts = answer_of_log(log, answer.request_id)
        [found] = recompute(header, parts, str(MODEL), Wanted(num_top))
        [completion] = answer.outputs
        expected = [
            {str(token_id): one.logprob for token_id, one in place.items()} for place in completion.logprobs or ()
        ]
        assert [one["token_id"] for one in found["tokens"]] == list(completion.token_ids)
        assert [one["top"] for one in found["tokens"]] == expected
