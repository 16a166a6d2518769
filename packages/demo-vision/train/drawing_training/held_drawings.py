"""Measures how many held drawings a served model names rightly, over HTTP."""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from drawing_training.drawing import draw_scene
from drawing_training.questions import describe, is_right
from drawing_training.scenes import Scene, random_scene

QUESTION = "What is in the picture?"
NUM_DRAWINGS = 200


@dataclass(frozen=True, slots=True)
class Held:
    """A drawing that training never drew: its generator has another seed."""

    scene: Scene
    png: bytes

    @property
    def kind(self) -> str:
        """What kind of picture it is, for the table."""
        if not self.scene.things:
            return "nothing"
        if self.scene.is_symbol:
            return "a digit" if self.scene.things[0].kind.isdigit() else "a letter"
        count = len(self.scene.things)
        return f"{count} shape{'s' if count > 1 else ''}"


def held_drawings(count: int = NUM_DRAWINGS) -> Iterator[Held]:
    """The first held drawings, as PNG files."""
    for number in range(count):
        draw = random.Random(f"held:{number}")
        scene = random_scene(draw)
        buffer = io.BytesIO()
        draw_scene(scene, draw).save(buffer, "PNG")
        yield Held(scene, buffer.getvalue())


def ask(url: str, model: str, png: bytes, question: str = QUESTION) -> str:
    """The greedy answer of a server about a picture."""
    picture = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    body = {"model": model, "temperature": 0, "max_tokens": 60, "messages": [{"role": "user", "content": content}]}
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        text: str = json.loads(response.read())["choices"][0]["message"]["content"]
    return text


def measure(url: str, model: str, count: int = NUM_DRAWINGS) -> dict[str, Any]:
    """Right answers by kind of picture, and the wrong ones as they came."""
    by_kind: dict[str, list[bool]] = {}
    wrong = []
    for held in held_drawings(count):
        answer = ask(url, model, held.png)
        found = is_right(answer, held.scene)
        by_kind.setdefault(held.kind, []).append(found)
        if not found:
            wrong.append({"picture": describe(held.scene), "answer": answer})
    rates = {kind: [sum(found), len(found)] for kind, found in sorted(by_kind.items())}
    return {"num_drawings": count, "num_right": count - len(wrong), "by_kind": rates, "wrong": wrong}


def main() -> None:
    """Asks a server about the held drawings, and writes what it answers."""
    parser = argparse.ArgumentParser(prog="drawing_training.held_drawings", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="llmstack-demo-vision")
    parser.add_argument("--count", type=int, default=NUM_DRAWINGS)
    parser.add_argument("--out", type=Path, help="rates.json, for the card")
    arguments = parser.parse_args()
    rates = measure(arguments.url, arguments.model, arguments.count)
    if arguments.out:
        arguments.out.write_text(json.dumps(rates, indent=2), encoding="utf-8")
    for one in rates["wrong"]:
        print(f"{one['picture']:50} {one['answer']}")
    print(rates["by_kind"], f"{rates['num_right']} of {rates['num_drawings']}")


if __name__ == "__main__":
    main()
