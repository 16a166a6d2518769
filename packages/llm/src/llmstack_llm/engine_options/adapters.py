"""Options of LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.engine_settings import AdapterSettings
from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import FileKind, words_of

if TYPE_CHECKING:
    from pathlib import Path

    from llmstack_llm.adapters import AdapterRegistry

_KINDS: Final = words_of(FileKind)


def check_media_adapters(value: Mapping[str, object]) -> Mapping[str, object]:
    """Each is the folder of an adapter by a kind of items.

    Raises:
        ValueError: A kind is unknown, or a folder is no text.
    """
    if not set(_KINDS).issuperset(value):
        raise ValueError(f"has other kinds than {', '.join(_KINDS)}")
    if not all(isinstance(path, str) and path for path in value.values()):
        raise ValueError("has a folder that is no text")
    return value


@option_group
class AdapterOptions(AdapterSettings, OptionGroup):
    """Limits of the number and the size of LoRA adapters."""

    title = "LoRA adapters"

    max_loras: int = option(1, at_least=1, at_most=1024, help="maximum distinct adapters in one step")
    max_cpu_loras: int | None = option(
        None,
        at_least=1,
        help="adapters that are kept in memory; the one that was used least recently is read again when it is needed "
        "(default: as --max-loras)",
    )

    default_mm_loras: Mapping[str, str] | None = option(
        None,
        check=check_media_adapters,
        help="folders of adapters for prompts with items of a kind, where the request names none; each has its kind as "
        "its name",
        example='{"audio": "granite-speech"}',
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds a memory that is smaller than a step, and adapters where none are served."""
        yield from super().conflicts()
        if self.default_mm_loras and not self.enable_lora:
            yield Problem("{default_mm_loras} needs {enable_lora}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield Problem(f"{{max_cpu_loras}} {self.max_cpu_loras} must be at least {{max_loras}} {self.max_loras}")

    def check_sound_adapter(self, whole: Mapping[str, object], folder: Path) -> None:
        """Checks that a model which needs an adapter for sound gets one.

        Args:
            whole: Its configuration with all parts; empty for one of text alone.
            folder: Where published models of this kind have their adapter too.

        Raises:
            ModelConfigError: It needs one, and none is given.
        """
        from llmstack_llm.model.config import ModelConfigError

        needs_one = whole.get("model_type") == "granite_speech" and whole.get("has_lora_adapter") is not False
        if needs_one and "audio" not in (self.default_mm_loras or {}):
            raise ModelConfigError(
                "this model has an adapter for prompts with sound: give --enable-lora and "
                f"--default-mm-loras {json.dumps({'audio': str(folder)})}, or --language-model-only"
            )

    def adapter_registry(self) -> AdapterRegistry:
        """The adapters of a front end: none yet."""
        from llmstack_llm.adapters import AdapterRegistry

        kinds = (self.default_mm_loras or {}).keys()
        return AdapterRegistry(is_enabled=self.enable_lora, max_bytes=self.max_lora_bytes, media_kinds=kinds)
