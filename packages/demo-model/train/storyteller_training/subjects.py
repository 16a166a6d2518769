"""Measures how often a served model tells a story about the subject that was asked for."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from storyteller_training.keywords import with_article
from storyteller_training.nouns import HELD_OUT, plural_of

ASKED = "Tell me a story about {}."
NOT_ASKED = "Tell me a story."
TEMPERATURE = 0.8
SEED = 1
SENTENCE = re.compile(r"[^.!?]*[.!?]+[\"')]*\s*")


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of answers that name the subject."""

    num_nouns: int
    draws: int
    temperature: float
    max_tokens: int
    asked: float
    """In the first three sentences of the answer to a request that names it."""
    not_asked: float
    """In those of the answer to a request without a subject."""
    again: float
    """After the first sentence that names it, of the answers that do."""
    ended: float
    """Share of the answers that end by themselves within the limit."""


def beginning_of(text: str, num_sentences: int = 3) -> str:
    """Return the first sentences of a text."""
    sentences = [match[0] for match in SENTENCE.finditer(text)][:num_sentences]
    return "".join(sentences) if len(sentences) == num_sentences else text


def mentions(text: str, noun: str) -> bool:
    """Tell whether a text holds a noun, in the singular, the plural or the possessive."""
    forms = "|".join(map(re.escape, sorted({plural_of(noun), noun}, key=len, reverse=True)))
    return re.search(rf"(?<![\w])({forms})(?![\w])", text, re.IGNORECASE) is not None


def named_again(text: str, noun: str) -> bool:
    """Tell whether a sentence after the first that names a noun names it too."""
    sentences = [match[0] for match in SENTENCE.finditer(text)]
    return sum(mentions(sentence, noun) for sentence in sentences) > 1


def answer_of(url: str, request: str, max_tokens: int, seed: int) -> tuple[str, bool]:
    """Return an answer and whether it ended by itself; all but temperature and length is the model's default."""
    body = {
        "messages": [{"role": "user", "content": request}],
        "temperature": TEMPERATURE,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    asked = Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(asked, timeout=600) as response:
        choice = json.load(response)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"] == "stop"


def answers_of(url: str, requests: Sequence[str], max_tokens: int) -> list[tuple[str, bool]]:
    """Return the answers of a server to all requests, each with a seed of its own."""
    with ThreadPoolExecutor(16) as pool:
        seeds = range(SEED, SEED + len(requests))
        return list(pool.map(lambda request, seed: answer_of(url, request, max_tokens, seed), requests, seeds))


def measure(url: str, nouns: Sequence[str], draws: int, max_tokens: int) -> tuple[Rates, list[tuple[str, str]]]:
    """Ask for every noun `draws` times, and as often for no subject; return the rates and the answers."""
    asked = [noun for _ in range(draws) for noun in nouns]
    named = answers_of(url, [ASKED.format(with_article(noun)) for noun in asked], max_tokens)
    unnamed = answers_of(url, [NOT_ASKED] * len(asked), max_tokens)
    hits = [mentions(beginning_of(text), noun) for noun, (text, _) in zip(asked, named, strict=True)]
    chance = [mentions(beginning_of(text), noun) for noun, (text, _) in zip(asked, unnamed, strict=True)]
    again = [named_again(text, noun) for noun, (text, _), hit in zip(asked, named, hits, strict=True) if hit]
    rates = Rates(
        num_nouns=len(nouns),
        draws=draws,
        temperature=TEMPERATURE,
        max_tokens=max_tokens,
        asked=sum(hits) / len(hits),
        not_asked=sum(chance) / len(chance),
        again=sum(again) / max(len(again), 1),
        ended=sum(ended for _, ended in named) / len(named),
    )
    return rates, [(noun, text) for noun, (text, _) in zip(asked, named, strict=True)]


def main() -> None:
    """Print the rates of a server, and some of its answers."""
    parser = argparse.ArgumentParser(prog="storyteller_training.subjects", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="server of the model folder")
    parser.add_argument("--draws", type=int, default=1, help="answers for each noun")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--show", type=int, default=0, help="number of answers to print")
    parser.add_argument("--out", type=Path, help="JSON file for the rates, which the card reads")
    arguments = parser.parse_args()
    rates, texts = measure(arguments.url, HELD_OUT, arguments.draws, arguments.max_tokens)
    for noun, text in texts[: arguments.show]:
        print(f"--- {noun}: {text}\n")
    print(json.dumps(asdict(rates), indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(asdict(rates), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
