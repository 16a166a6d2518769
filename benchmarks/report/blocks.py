"""The blocks of each part, the most important first, and which of them a budget has room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the report that runs or is dropped as a whole.

    Attributes:
        cost_s: What it takes on a card, generously; a block is started only if so much is left.
        function: `module:function`, imported when it runs, so that what it lacks harms no other block.
    """

    name: str
    cost_s: float
    function: str

    @property
    def limit_s(self) -> float:
        """After which it is taken for stuck; the first call of a kernel compiles it, which can take long."""
        return 60 + 2 * self.cost_s


def _kernels(name: str, cost_s: float, function: str) -> Block:
    return Block(name, cost_s, f"report.kernels.{function}")


def _engine(name: str, cost_s: float, function: str) -> Block:
    return Block(name, cost_s, f"report.engine.{function}")


CEILINGS = Block("ceilings", 20, "report.ceilings:run")

PARTS: dict[str, tuple[Block, ...]] = {
    "kernels": (
        CEILINGS,
        _kernels("correctness", 40, "correctness:run"),
        _kernels("invariance", 40, "invariance:run"),
        _kernels("decode attention", 60, "decode_attention:run"),
        _kernels("linears", 50, "linears:run"),
        _kernels("prefill attention", 30, "prefill_attention:run"),
        _kernels("elementwise", 20, "elementwise:run"),
        _kernels("sampling", 20, "sampling:run"),
        _kernels("linears, quantized", 60, "linears:run_quantized"),
        _kernels("experts", 20, "experts:run"),
        _kernels("decode attention, fp8 KV", 40, "decode_attention:run_fp8"),
        _kernels("linear configurations", 90, "configurations:run"),
        _kernels("decode attention, peers", 60, "decode_attention:run_peers"),
        _kernels("prefill attention, FlexAttention", 40, "prefill_attention:run_flex"),
    ),
    "engine": (
        CEILINGS,
        _engine("engine correctness", 50, "correctness:run"),
        _engine("8B decode", 60, "decode:run_8b"),
        _engine("1B decode", 45, "decode:run_1b"),
        _engine("GPT-2 decode", 30, "decode:run_gpt2"),
        _engine("8B drafts", 40, "decode:run_8b_drafts"),
        _engine("8B requests", 90, "requests:run_8b"),
        _engine("8B static cache", 60, "transformers_peer:run_8b"),
        _engine("1B static cache", 50, "transformers_peer:run_1b"),
        _engine("GPT-2 static cache", 40, "transformers_peer:run_gpt2"),
        _engine("1B continuous batching", 60, "transformers_peer:run_batching_1b"),
        _engine("8B continuous batching", 70, "transformers_peer:run_batching_8b"),
        _engine("ablations", 60, "ablations:run"),
        _engine("8B decode, int8", 40, "decode:run_8b_int8"),
        _engine("1B requests", 40, "requests:run_1b"),
        _engine("8B decode, fp8 KV", 40, "decode:run_8b_fp8_kv"),
    ),
    "tests": (Block("tests", 300, "report.own_tests:run"),),
}


def find(part: str, name: str) -> Block:
    """The block of that name; KeyError if there is none."""
    for block in PARTS[part]:
        if block.name == name:
            return block
    raise KeyError(name)


def fits(block: Block, remaining_s: float) -> bool:
    """Whether to start it."""
    return block.cost_s <= remaining_s
