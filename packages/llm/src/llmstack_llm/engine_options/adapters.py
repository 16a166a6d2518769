"""Options of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_llm.options.option import OptionGroup, option, option_group
from llmstack_llm.options.problem import Problem


@option_group
class AdapterOptions(OptionGroup):
    """How many LoRA adapters are served, and how large they may be."""

    title = "LoRA adapters"

    enable_lora: bool = option(False, flag="--enable-lora", help="serve LoRA adapters beside the model")
    max_loras: int = option(
        1, flag="--max-loras", at_least=1, at_most=1024, metavar="N", help="maximum distinct adapters in one step"
    )
    max_lora_rank: int = option(
        16, flag="--max-lora-rank", at_least=1, at_most=512, metavar="N", help="maximum rank of an adapter"
    )
    max_cpu_loras: int | None = option(
        None,
        flag="--max-cpu-loras",
        at_least=1,
        metavar="N",
        help="adapters that are kept in memory; the one that was used least recently is read again when it is needed "
        "(default: as --max-loras)",
    )
    max_lora_bytes: int = option(
        1 << 30,
        flag="--max-lora-bytes",
        at_least=1,
        suffixes=True,
        metavar="BYTES",
        help="maximum size of an adapter's file",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Adds a memory that is smaller than a step."""
        yield from super().conflicts()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield Problem(f"{{max_cpu_loras}} {self.max_cpu_loras} must be at least {{max_loras}} {self.max_loras}")
