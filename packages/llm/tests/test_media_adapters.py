"""Adapters of prompts with items of a kind, which the request does not name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmstack_llm.adapters import AdapterRegistry
from llmstack_llm.requests import Adapter, AdmittedRequest
from llmstack_types import InvalidRequestError, SamplingParams

AUDIO, STYLE = (Adapter(name, f"{name}@1@1", f"/adapters/{name}") for name in ("audio", "style"))


def registry(*kinds: str) -> AdapterRegistry:
    made = AdapterRegistry(is_enabled=True, media_kinds=kinds)
    made.add(AUDIO)
    made.add(STYLE)
    return made


def prompt(*kinds: str) -> AdmittedRequest:
    placed: Any = tuple(SimpleNamespace(kind=kind) for kind in kinds)
    return AdmittedRequest(None, [1], SamplingParams(), placed=placed)


@pytest.mark.parametrize(
    ("kinds", "asked", "expected"),
    [
        ((), None, None),
        (("audio",), None, AUDIO),
        (("audio", "image", "audio"), None, AUDIO),
        (("image",), None, None),
        (("audio",), STYLE, STYLE),
        ((), STYLE, STYLE),
    ],
)
def test_a_prompt_has_the_adapter_of_its_items_unless_it_names_one(
    kinds: tuple[str, ...], asked: Adapter | None, expected: Adapter | None
) -> None:
    assert registry("audio").adapted(prompt(*kinds), asked).adapter == expected


def test_what_has_no_one_adapter_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="items of the kinds audio and image have an adapter each"):
        registry("audio", "image").adapted(prompt("image", "audio"), None)
    unloaded = registry("audio")
    unloaded.remove("audio")
    with pytest.raises(InvalidRequestError, match="the adapter for audio is not loaded"):
        unloaded.adapted(prompt("audio"), None)
    assert unloaded.adapted(prompt(), None).adapter is None
