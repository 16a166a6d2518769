"""What it costs in accuracy to round the inputs of layers to 8 bits, by how many inputs share a scale.

transformers in float32, on the weights of a GGUF file, whose linear layers get rounded inputs: no kernel has a part in
it. `difference` is the mean of the divergence (KL) of each token's probabilities from those of exact inputs, and
`other tokens` is how often another token is the most likely one.

    python packages/llm/benchmarks/measure_input_rounding.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from llmstack_kernels.linear.segments import round_segments

HELD_TEXT = Path(__file__).with_name("held_text.txt")
MAX_WINDOW = 1024
SIZES = (None, 256, 64, 32, 16)
"""Inputs that share a scale; None is a whole row."""


class Rounding:
    """Rounds what the linear layers of a model get, while it is on."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.is_on = False
        self.size: int | None = None
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(self._round)

    def _round(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if not self.is_on:
            return None
        rows = inputs[0].flatten(0, -2)
        return (round_segments(rows, self.size or rows.shape[-1]).view_as(inputs[0]),)


def log_probabilities(model: Any, windows: list[torch.Tensor]) -> torch.Tensor:
    """Of every token after each token but the last of a window: float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        return torch.cat([model(window[None]).logits[0, :-1].float().log_softmax(-1) for window in windows])


def row(exact: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> str:
    """Cells of a row of the table."""
    wanted, own = (-one.gather(1, targets[:, None]).mean() for one in (exact, found))
    divergence = torch.nn.functional.kl_div(found, exact, reduction="batchmean", log_target=True)
    others = (found.argmax(-1) != exact.argmax(-1)).float().mean()
    return f"{own.exp():.3f} | {(own - wanted).exp() - 1:+.2%} | {divergence:.4f} | {others:.1%}"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--text", type=Path, default=HELD_TEXT)
    options = parser.parse_args()
    names: dict[str, Any] = {"gguf_file": options.model.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model.parent, dtype=torch.float32, **names)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model.parent, **names)
    rounding = Rounding(model)
    windows = torch.tensor(tokenizer.encode(options.text.read_text(encoding="utf-8"))).split(MAX_WINDOW)
    targets = torch.cat([window[1:] for window in windows])
    exact = log_probabilities(model, windows)
    print("| inputs of a scale | perplexity | change | difference | other tokens |\n|---|---|---|---|---|")
    print(f"| exact | {row(exact, exact, targets)} |", flush=True)
    rounding.is_on = True
    for rounding.size in SIZES:
        print(f"| {rounding.size or 'all'} | {row(exact, log_probabilities(model, windows), targets)} |", flush=True)


if __name__ == "__main__":
    main()
