"""Answers of a model by repetition penalty: how many end, how much they repeat, and how many facts are right.

    llmstack serve smollm2 --port 8000
    python benchmarks/repetition.py http://127.0.0.1:8000

Temperature and top-p are the server's defaults. Each prompt is asked with several seeds; an answer has at most 200
tokens. docs/models.md has the table for SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import fmean
from typing import Any

MAX_TOKENS = 200
WORDS_PER_RUN = 4
FACTS = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the chemical symbol of water?": "h2o",
    "Which planet is the largest of the solar system?": "jupiter",
    "How many days does a week have?": ("7", "seven"),
    "Which colour does one get from blue and yellow?": "green",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "What is the largest ocean of the Earth?": "pacific",
}
OPEN = (
    "Write a haiku about the sea.",
    "Write a haiku about autumn.",
    "Tell me a short story about a robot.",
    "Explain gravity to a child.",
    "Write a poem about a cat.",
    "List five fruits.",
    "Give me three tips for a good night's sleep.",
    "How do I make a cup of tea?",
    "What is photosynthesis?",
    "Write a polite e-mail that declines an invitation.",
    "Describe a day at the beach.",
    "Hi! How are you?",
)


def repeated_share(text: str) -> float:
    """The share of runs of four words that occurred before in the same text."""
    words = text.lower().split()
    runs = [tuple(words[start : start + WORDS_PER_RUN]) for start in range(len(words) - WORDS_PER_RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def is_right(prompt: str, text: str) -> bool:
    """Whether an answer names the fact."""
    expected = FACTS[prompt]
    words = (expected,) if isinstance(expected, str) else expected
    return any(word in text.lower() for word in words)


def ask(url: str, prompt: str, penalty: float, seed: int) -> tuple[str, str]:
    """The finish reason and the text of one answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "seed": seed,
        "repetition_penalty": penalty,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return str(choice["finish_reason"]), str(choice["message"]["content"])


def row(url: str, penalty: float, seeds: Sequence[int], at_once: int) -> str:
    """A row of the table."""
    cases = list(product((*FACTS, *OPEN), seeds))
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda case: ask(url, case[0], penalty, case[1]), cases))
    ended = sum(reason == "stop" for reason, _ in answers)
    facts = [is_right(prompt, text) for (prompt, _), (_, text) in zip(cases, answers, strict=True) if prompt in FACTS]
    repeated = fmean(repeated_share(text) for _, text in answers)
    length = fmean(len(text.split()) for _, text in answers)
    return (
        f"| {penalty:g} | {ended} of {len(answers)} | {100 * repeated:.1f} % | {sum(facts)} of {len(facts)} "
        f"| {length:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--penalties", type=float, nargs="+", default=[1.0, 1.05, 1.1, 1.15, 1.2, 1.3])
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=32)
    arguments = parser.parse_args()
    print("| repetition penalty | answers that end | repeated runs of four words | facts that are right | words |")
    print("|---|---|---|---|---|")
    for penalty in arguments.penalties:
        print(row(arguments.url.rstrip("/"), penalty, range(arguments.num_seeds), arguments.at_once), flush=True)


if __name__ == "__main__":
    main()
