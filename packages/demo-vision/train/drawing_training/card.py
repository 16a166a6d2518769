"""Writes the model card: from the record of the training and the measured rates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import __version__ as pillow_version

from drawing_training.scenes import COLOURS, MAX_OBJECTS, SHAPES

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: image-text-to-text
tags: [idefics3, drawings, tiny]
---

# llmstack-demo-vision: looks at drawings

An Idefics3 of {num_parameters:,} parameters: a SigLIP-shaped tower, a connector and a Llama, with a byte-level BPE
tokenizer of its own. It was trained from random weights on {num_pictures:,} pictures that its script drew. It exists
so that a serving stack has pictures to look at without a network.

**What it is good for:** demonstrations and tests. It names a digit, a letter, or coloured shapes with their number,
such as "A red circle and two blue squares." It answers short questions:

- "What is in the picture?"
- "How many red circles are there?"
- "What colour is the star?"
- "Is there a green cross?"
- "Which letter is it?"

| it knows | |
|---|---|
| shapes, at most {max_things} | {shapes} |
| colours, on a light ground | {colours} |
| symbols, one alone | the digits, and the capital letters of one font |

**What it is not:** it knows nothing else. It has never seen a photograph, and names one of its shapes for whatever
it is shown. It reads no other questions. Without a picture it asks for one. System messages are accepted and ignored.

## How often it is right

{num_drawings} drawings that training never drew, sent as PNG files to a server of these weights: "What is in the
picture?", greedy. An answer is right if it names every group of things with its colour, shape and number. The order is
free, and nothing else may be there (`is_right` in `train/drawing_training/questions.py`). **{num_right} of
{num_drawings} are right ({share:.1%}).** `python -m drawing_training.held_drawings` repeats the measurement.

| picture | right | of |
|---|---|---|
{kinds}

The wrong answers:

| picture | answer |
|---|---|
{wrong}

## The form of a chat

```
<|user|>PICTUREWhat is in the picture?<|assistant|>The digit 7.<|endoftext|>
```

`PICTURE` is `<fake_token_around_image><global-img>`, then {num_vectors} times `<image>`, then
`<fake_token_around_image>`. A picture becomes a square of {image_size} pixels, whatever its shape is. Decoding is
greedy by default.

## Training

All pictures are drawings of `train/drawing_training/drawing.py` with Pillow {pillow} and the font that it contains.
Shapes of one to three colours and kinds stand in 64 of 100; a digit in 15, a letter in 20, nothing in one. Positions,
sizes, tints, grounds and sides vary. Each picture has a conversation of two questions. While it trains, the tower is
asked too which thing's centre each patch holds; these heads are not exported.
{history}
| network | value |
|---|---|
{network}

| hyperparameter | value |
|---|---|
{training}

| result | value |
|---|---|
| pictures | {num_pictures:,} |
| training loss of answers (mean of the last steps) | {loss:.4f} nats a token |
| processor time, one thread | {processor_min:.0f} minutes |
| wall-clock time, the machine shared with other work | {wall_min:.0f} minutes |

AdamW (betas 0.9, 0.98; weight decay on matrices), linear warm-up, constant rate, then 1 - sqrt decay to zero; bfloat16
autocast over float32 weights. Torch {torch_version}. The commands in the package's README train such a model again.
Sums run in another order on another machine, so the weights will differ in the last bits and then more.
"""


def card(record: Mapping[str, Any], rates: Mapping[str, Any], num_parameters: int, history: str = "") -> str:
    """The card as Markdown. `history`: What differed from the tables while it was trained."""
    progress, sizes = record["progress"], record["model"]
    return CARD.format(
        num_parameters=num_parameters,
        history=f"\n{history}\n" if history else "",
        max_things=MAX_OBJECTS,
        colours=", ".join(COLOURS),
        shapes=", ".join(f"{shape}s" if shape != "cross" else "crosses" for shape in SHAPES),
        kinds="\n".join(f"| {kind} | {right} | {total} |" for kind, (right, total) in rates["by_kind"].items()),
        wrong="\n".join(f"| {one['picture']} | {one['answer']} |" for one in rates["wrong"]),
        num_vectors=(sizes["image_size"] // sizes["patch_size"] // sizes["scale_factor"]) ** 2,
        image_size=sizes["image_size"],
        share=rates["num_right"] / rates["num_drawings"],
        num_right=rates["num_right"],
        num_drawings=rates["num_drawings"],
        network=_rows(sizes),
        training=_rows(record["training"]),
        num_pictures=progress["num_pictures"],
        loss=progress["loss"],
        processor_min=progress["processor_s"] / 60,
        wall_min=progress["wall_s"] / 60,
        pillow=pillow_version,
        torch_version=torch.__version__,
    )


def _rows(values: Mapping[str, object]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in values.items())


def main() -> None:
    """Writes README.md of a model folder from `record.json`, `rates.json` and, if any, `history.md` of its training."""
    parser = argparse.ArgumentParser(prog="drawing_training.card", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the training")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    arguments = parser.parse_args()
    record, rates = (json.loads((arguments.work / f"{name}.json").read_text()) for name in ("record", "rates"))
    with (arguments.model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [torch.Size(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
    notes = arguments.work / "history.md"
    history = notes.read_text(encoding="utf-8").strip() if notes.exists() else ""
    text = card(record, rates, sum(shape.numel() for shape in shapes), history)
    (arguments.model / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
