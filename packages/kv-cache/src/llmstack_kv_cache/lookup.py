"""The last lookup of a cache, until blocks are taken or forgotten."""

from __future__ import annotations

from llmstack_kv_cache.prefix_index import ROOT, Prefix
from llmstack_kv_cache.states import EMPTY_STATE, State

Lookup = tuple[str, int, list[int], Prefix, State, tuple[int, ...]]
"""A lookup: who looked, for how many tokens; what was found; in blocks, where prefixes may end that others want."""

NO_LOOKUP: Lookup = ("", 0, [], ROOT, EMPTY_STATE, ())
