"""Keywords of `LLM`, of which some are vLLM's alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from llmstack_llm.engine_args import EngineArgs, EngineArgsError
from llmstack_llm.options.accepted_flags import ACCEPTED_FLAGS
from llmstack_llm.options.foreign import foreign_flag, replaced_flags
from llmstack_llm.options.option import key_flags, options_of
from llmstack_llm.options.refused_flags import REFUSED_FLAGS
from llmstack_llm.options.value_type import as_text

logger = logging.getLogger(__name__)

# Options of a server, which ask for what is always there offline.
_ALWAYS_ON = ("enable_sleep_mode",)
_VARIABLES: Mapping[str, str] = {"download_dir": "HF_HUB_CACHE", "hf_token": "HF_TOKEN"}


def own_options(given: Mapping[str, object]) -> dict[str, Any]:
    """The keywords that are fields of `EngineArgs`; None, which is vLLM's default of most, is left out.

    Those of vLLM that only tune what is chosen here anyway are left out with a line in the log.

    Raises:
        EngineArgsError: Others are refused or unknown; the text says why, or names the nearest option.
    """
    given = _with_whole_objects(_with_first_names(given))
    known = [field.name for field in fields(EngineArgs)]  # `llmstack verify` sets one that is no option
    own = {name: value for name, value in given.items() if name in known and value is not None}
    others = {name: value for name, value in given.items() if name not in (*known, *_ALWAYS_ON) and value is not None}
    flags = {**REFUSED_FLAGS, **ACCEPTED_FLAGS, **replaced_flags(options_of(EngineArgs))} if others else {}
    problems: list[str] = []
    unknown: list[str] = []
    for name, value in sorted(others.items()):
        flag = foreign_flag(flags, f"--{name.replace('_', '-')}")
        if name in _VARIABLES:
            problems.append(f"{name}: set the variable {_VARIABLES[name]}")
        elif flag is None:
            unknown.append(f"{name}{_nearest(name, known)}")
        elif refusal := flag.refusal(as_text(value)):
            problems.append(f"{name}: {refusal}")
        elif flag.is_accepted and not flag.accepts(as_text(value)):
            logger.warning("%s has no effect: %s", name, flag.reason)
    problems += [f"unknown options: {', '.join(unknown)}"] if unknown else []
    if problems:
        raise EngineArgsError("; ".join(problems))
    return own


def served_name(given: dict[str, Any]) -> str:
    """The first of `served_model_name`, which is taken out; empty where there is none."""
    names = given.pop("served_model_name", None) or ""
    return names if isinstance(names, str) else str(names[0])


def _with_first_names(given: Mapping[str, object]) -> dict[str, object]:
    """Keywords under the first name of their option, such as `pooler_config` for `override_pooler_config`."""
    options = options_of(EngineArgs)
    firsts = {_keyword(flag): option.key for option in options for flag in option.declared.also}
    named: dict[str, object] = {}
    for name, value in given.items():
        first = firsts.get(name, name)
        if value is not None and named.get(first, value) != value:
            raise EngineArgsError(f"{name}: it is another name of {first}, which has another value")
        if value is not None or first not in named:
            named[first] = value
    return named


def _with_whole_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of one key, such as `rope_scaling`, put into the object that the key belongs into."""
    name_to_key = {_keyword(flag): key for flag, key in key_flags(options_of(EngineArgs)).items()}
    whole = {name: value for name, value in given.items() if name not in name_to_key}
    for name, value in given.items():
        if name in name_to_key and value is not None:
            flag, _, key = name_to_key[name].partition(".")
            others = whole.get(_keyword(flag)) or {}
            whole[_keyword(flag)] = {key: value} | (json.loads(others) if isinstance(others, str) else others)
    return whole


def _keyword(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _nearest(name: str, known: list[str]) -> str:
    import difflib  # late: only a mistyped name needs it

    nearest = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
