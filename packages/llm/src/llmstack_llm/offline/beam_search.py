"""Parameters and results of `LLM.beam_search`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llmstack_llm.outputs.request_output import CompletionOutput, Logprob, RequestOutput
from llmstack_types import RequestOutputKind

PARAM_NAMES: Mapping[str, str] = {"n": "beam_width"}
"""Fields of `SamplingParams` that are called otherwise here."""
PARAM_FIELDS: Mapping[str, str] = {name: field for field, name in PARAM_NAMES.items()}


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`.

    Attributes:
        beam_width: Running beams, and returned sequences for each prompt.
        temperature: 0 or 1; a search draws nothing.
        length_penalty: A sequence's score is its log-probability divided by its generated length to this power.
        early_stopping: When the search ends: see `SamplingParams`.

    What has no field here, such as `no_repeat_ngram_size`, is as the model's `generation_config.json` says.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def to_fields(self) -> dict[str, object]:
        """Fields of `SamplingParams`, still to be checked; the model's defaults count for all others."""
        own = {PARAM_FIELDS.get(one.name, one.name): getattr(self, one.name) for one in fields(self)}
        return own | {"use_beam_search": True, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found.

    Attributes:
        tokens: Prompt and output.
        logprobs: One entry per generated token.
        cum_logprob: Their sum, not divided by the length.
        text: The prompt's and the output's; None without a tokenizer.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def to_beam_search_output(output: RequestOutput, prompt_text: str | None) -> BeamSearchOutput:
    """A finished request in the form of `LLM.beam_search`; `prompt_text` None leaves out the texts."""
    return BeamSearchOutput([_sequence(output, completion, prompt_text) for completion in output.outputs])


def _sequence(output: RequestOutput, completion: CompletionOutput, prompt_text: str | None) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=[*output.prompt_token_ids, *completion.token_ids],
        logprobs=completion.logprobs or [],
        cum_logprob=completion.cumulative_logprob or 0.0,
        text=None if prompt_text is None else prompt_text + completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
