"""The engine requests of one request: several completions, or none."""

from __future__ import annotations

import dataclasses

from llmstack_llm.admission.seeds import completion_seed
from llmstack_types import EngineCoreRequest


def fan_out(first: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The engine requests of a request with several completions, or with none."""
    params = first.sampling_params
    # Choosing the best takes the log-probabilities of all.
    logprobs = params.logprobs or 0 if params.num_generated > params.n else params.logprobs
    return [
        dataclasses.replace(
            first,
            request_id=first.request_id if params.num_generated == 1 else f"{index}_{first.request_id}",
            prompt_token_ids=list(first.prompt_token_ids),
            sampling_params=dataclasses.replace(
                params,
                n=params.n if params.use_beam_search else 1,
                best_of=None,
                logprobs=logprobs,
                seed=completion_seed(params.seed or 0, index),
                max_tokens=params.max_tokens or 1,  # nothing to generate still takes a step that computes the prompt
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
            fork_of=f"0_{first.request_id}" if index else "",
        )
        for index in range(params.num_generated)
    ]
