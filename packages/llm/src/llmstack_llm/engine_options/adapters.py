"""Options of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.engine_settings import AdapterSettings
from llmstack_types.options import option, option_group


@option_group
class AdapterOptions(AdapterSettings, OptionGroup):
    """How many LoRA adapters are served, and how large they may be."""

    title = "LoRA adapters"

    max_loras: int = option(
        1, flag="--max-loras", at_least=1, at_most=1024, metavar="N", help="maximum distinct adapters in one step"
    )
    max_cpu_loras: int | None = option(
        None,
        flag="--max-cpu-loras",
        at_least=1,
        metavar="N",
        help="adapters that are kept in memory; the one that was used least recently is read again when it is needed "
        "(default: as --max-loras)",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds a memory that is smaller than a step."""
        yield from super().conflicts()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield Problem(f"{{max_cpu_loras}} {self.max_cpu_loras} must be at least {{max_loras}} {self.max_loras}")
