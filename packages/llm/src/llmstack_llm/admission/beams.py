"""Beam searches over what the model's own file says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llmstack_llm import request_errors
from llmstack_llm.model.beam_defaults import BeamDefaults

_OF_ALL: Final = ("max_tokens", "repetition_penalty", "forced_bos_token_id")
"""Defaults of every request that a beam search takes too; the others are of draws, and it draws nothing."""
_FORCED: Final = "forced_bos_token_id"


def with_beam_defaults(
    given: Mapping[str, object], defaults: Mapping[str, object], beams: BeamDefaults, names: Mapping[str, str]
) -> dict[str, object]:
    """The fields of a beam search, and those of the model that it does not give; all are still to be checked.

    `defaults`: The model's defaults of every request.

    Raises:
        InvalidRequestError: The model's own file asks for what no beam search here does.
    """
    if beams.refused:
        reason = f"generation_config.json has '{beams.refused[0]}', which no beam search here applies"
        raise request_errors.unsupported_parameter(names.get("use_beam_search", "use_beam_search"), reason)
    return {**{name: defaults[name] for name in _OF_ALL if name in defaults}, **beams.sampling, **given}


def of_prompt(
    values: Mapping[str, object], beams: BeamDefaults, token_ids: list[int], max_tokens: int, *, has_source: bool
) -> dict[str, int]:
    """The fields of a beam search that depend on its prompt.

    `token_ids`: Those that the decoder goes on from.
    `has_source`: Whether these are its first ones, of which all but one count as generated.
    """
    found: dict[str, int] = {}
    if has_source and len(token_ids) > 1:
        found[_FORCED] = token_ids[1]
    if "min_tokens" not in values:
        found["min_tokens"] = beams.min_tokens(len(token_ids), max_tokens)
    return found
