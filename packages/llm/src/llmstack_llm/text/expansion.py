"""Bounds on how far a tokenizer's steps may lengthen a text."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping

import tokenizers

from llmstack_types.json_values import JSONValue

MAX_EXPANSION = 16
"""Normalizers of published models replace single characters by single ones, which is a factor of 1 or 2. Unicode's own
decompositions, at most 18 characters for one, are not counted."""
MAX_TEMPLATE_TOKENS = 1024
"""Tokens that a post-processor may add to a text."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_STEP_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_MOST_OF_UNICODE = 18
"""Characters that the longest compatibility decomposition has (U+FDFA)."""


def find_expansion_problem(backend: tokenizers.Tokenizer) -> str:
    """Why a short text would cost this tokenizer the work of a long one; empty where it does not."""
    for part in _PARTS:
        component = getattr(backend, part)
        # The library gives the settings of a part in no other way.
        steps = [] if component is None else [*_steps(json.loads(component.__getstate__()))]
        # Each byte that is not ASCII becomes two, so only the first of these steps is needed.
        num_repeated = max(0, sum(step.get("type") == "ByteLevel" for step in steps) - 1)
        if num_repeated + sum(math.log2(_factor(step)) for step in steps) > math.log2(MAX_EXPANSION):
            return f"its {part} may make a text more than {MAX_EXPANSION} times as long"
    return _template_problem(backend)


def _steps(settings: object) -> Iterator[Mapping[str, JSONValue]]:
    """The steps of a part, those in nested sequences too."""
    if not isinstance(settings, Mapping):
        return
    nested = [step for key in _STEP_LISTS for step in settings.get(key) or ()]
    if not nested:
        yield settings
    for step in nested:
        yield from _steps(step)


def _factor(step: Mapping[str, JSONValue]) -> float:
    """The most characters that a step may make of one."""
    kind = step.get("type")
    if kind == "Prepend":  # also in front of what follows a special token
        return max(1, len(step["prepend"]))
    if kind == "Replace":
        content = len(step["content"])
        pattern = step["pattern"].get("String")
        # An expression may match a single character, or none between any two.
        return max(1.0, content / max(1, len(pattern)) if pattern is not None else content)
    if kind == "Precompiled":
        return max(1.0, _longest_replacement(step["precompiled_charsmap"]) / _MOST_OF_UNICODE)
    return 1.0


def _longest_replacement(charsmap: str) -> int:
    """Characters of the longest text in a map of sentencepiece: the size of a search tree, the tree, and texts."""
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))


def _template_problem(backend: tokenizers.Tokenizer) -> str:
    post_processor = backend.post_processor
    if post_processor is None:
        return ""
    for is_pair in (False, True):
        if backend.num_special_tokens_to_add(is_pair) > MAX_TEMPLATE_TOKENS:
            return f"its post_processor adds more than {MAX_TEMPLATE_TOKENS} tokens to a text"
    for processor in _steps(json.loads(post_processor.__getstate__())):
        for form in ("single", "pair"):
            names = [piece["Sequence"]["id"] for piece in processor.get(form) or () if "Sequence" in piece]
            if len(names) != len(set(names)):
                return "its post_processor repeats the text"
    return ""
