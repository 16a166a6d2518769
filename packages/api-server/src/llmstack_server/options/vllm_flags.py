"""The flags of vLLM by name, as `vllm_flags.json` lists them for one version."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from llmstack_llm.options.foreign import ForeignFlag

_FILE = os.path.join(os.path.dirname(__file__), "vllm_flags.json")


class FlagList(NamedTuple):
    """Names and forms of the flags of one version of an engine.

    Attributes:
        kinds: Flag to `switch`, `value`, `list` or `json`.
        short_to_flag: Short forms, and second names.
    """

    engine: str
    version: str
    kinds: Mapping[str, str]
    short_to_flag: Mapping[str, str]


def read_flag_list() -> FlagList:
    """The flags of `vllm serve`."""
    with open(_FILE, encoding="utf-8") as file:
        found = json.load(file)
    kinds = {name: kind for kind in ("switch", "value", "list", "json") for name in found[kind]}
    return FlagList(found["engine"], found["version"], kinds, found["short"])


def with_forms(flags: Mapping[str, ForeignFlag], known: FlagList) -> dict[str, ForeignFlag]:
    """Flags in the forms of their engine; flags of older versions keep their own."""
    shorts = {name: short for short, name in known.short_to_flag.items() if not short.startswith("--")}
    formed = dict(flags)
    for name, flag in flags.items():
        if kind := known.kinds.get(name):
            formed[name] = flag._replace(
                is_switch=kind == "switch", is_list=kind == "list", is_json=kind == "json",
                short=shorts.get(name, ""),
            )  # fmt: skip
    return formed
