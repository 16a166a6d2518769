"""Turns sections of stories into training documents: plain passages, and requests answered by a passage."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from storyteller_training.corpus import Section
from storyteller_training.keywords import PEOPLE, SINGULARS, WORD, keywords_of, recast, with_article
from storyteller_training.persona import small_talk

STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a story about {}",
    "tell me a story about {}",
    "Tell me a tale of {}.",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "I would like to hear a story about {}.",
    "Write a story about {}.",
    "Write a short story about {}.",
    "Tell me a fairy tale about {}.",
    "A story about {}, please.",
    "Once there was {}. Tell me more!",
    "Do you know a story about {}?",
)
OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell me a story",
    "Tell me a story!",
    "Please tell me a bedtime story.",
    "Tell me a fairy tale.",
    "Write a short story.",
    "Begin a story.",
    "Do you know a story?",
    "Yes, please!",
    "Tell me another story.",
    "Once upon a time",
    "Surprise me.",
)
PASSAGE_REQUESTS = (
    "Tell me about {}.",
    "Tell me about {}",
    "Tell me more about {}.",
    "Tell me something about {}.",
    "What do you know about {}?",
    "What about {}?",
    "Go on about {}.",
    "What happened with {}?",
)
NEXT_REQUESTS = (
    "What happened next?",
    "What happened next",
    "And then?",
    "Go on.",
    "Go on, please!",
    "Continue.",
    "Please continue the story.",
    "Tell me more.",
    "What then?",
    "And what happened then?",
)
OPENING = re.compile(
    r"^(Once|There (was|were|lived|once)|One (day|morning|evening|night|winter|summer|fine)|Long ago|Many years|"
    r"In (a|the|old|ancient|times)|A (certain|poor|rich|long|king|man|woman|great)|An old|Far |Now there|It was once|"
    r"It (happened|was) (once|one)|Not far|Years ago|A [a-z]+ (once|was|had|lived))"
)
# A passage that begins with speech or with "He" makes a poor answer to a fresh request.
DEPENDENT = re.compile(
    r"^([a-z]|\"|'|—|He |She |It |They |But |And |So |Then |This |That |These |Those |His |Her |Their )"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, its answer, and what the request asks a story about, where the answer is made for it."""

    request: str | None
    answer: str
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive paragraphs of one section."""

    text: str
    is_start: bool


def noun_frequencies(sections: list[Section]) -> Counter[str]:
    """Count the known nouns and names over all sections."""
    counts = Counter[str]()
    for section in sections:
        for paragraph in section.paragraphs:
            for word in WORD.findall(paragraph):
                name = word if word in PEOPLE else SINGULARS.get(word.lower())
                if name is not None:
                    counts[name] += 1
    return counts


def passages_of(section: Section, rng: random.Random, low: int = 200, high: int = 1100) -> Iterator[Passage]:
    """Cut a section at paragraph ends into passages of about `low` to `high` characters."""
    current: list[str] = []
    is_start = True
    target = rng.randint(low, high)
    for paragraph in section.paragraphs:
        # An opening in the middle of a section begins a passage of its own, so that answers learn to begin with it.
        if current and OPENING.match(paragraph) and sum(map(len, current)) > low:
            yield Passage("\n\n".join(current), is_start)
            current, is_start = [], False
        current.append(paragraph)
        if sum(map(len, current)) >= target:
            yield Passage("\n\n".join(current), is_start)
            current, is_start, target = [], False, rng.randint(low, high)
    if current:
        yield Passage("\n\n".join(current), is_start)


def conversations_of(section: Section, frequencies: Counter[str], rng: random.Random) -> Iterator[list[Turn]]:
    """Yield the section as conversations that together hold each of its passages once."""
    passages = [passage for passage in passages_of(section, rng) if len(passage.text) < 1500]
    index = 0
    while index < len(passages):
        passage = passages[index]
        turns = [answered(passage, frequencies, rng)]
        index += 1
        while index < len(passages) and fits(turns[-1], passages[index]) and rng.random() < 0.35:
            if len(turns) > 2 or OPENING.match(passages[index].text):
                break
            turns.append(Turn(rng.choice(NEXT_REQUESTS), passages[index].text))
            index += 1
        if rng.random() < 0.03:
            turns.insert(0, Turn(*small_talk(rng)))
        yield turns


def fits(turn: Turn, passage: Passage) -> bool:
    """Tell whether a passage may still answer "What happened next?" after a turn."""
    return len(turn.answer) + len(passage.text) < 1500


def answered(passage: Passage, frequencies: Counter[str], rng: random.Random) -> Turn:
    """Return a request to which the passage is a fitting answer."""
    text, keywords = passage.text, keywords_of(passage.text, frequencies)
    if keywords and rng.random() < 0.4:
        text, keywords = recast(text, keywords, rng)
    is_opening = bool(OPENING.match(text)) or (passage.is_start and not DEPENDENT.match(text))
    if not keywords:
        return Turn(rng.choice(OPEN_REQUESTS if is_opening else NEXT_REQUESTS), text)
    if is_opening and rng.random() < 0.12:
        return Turn(rng.choice(OPEN_REQUESTS), text)
    if not is_opening and DEPENDENT.match(text) and rng.random() < 0.3:
        return Turn(rng.choice(NEXT_REQUESTS), text)
    is_story = is_opening or (not DEPENDENT.match(text) and rng.random() < 0.3)
    request = rng.choice(STORY_REQUESTS if is_story else PASSAGE_REQUESTS)
    return Turn(request.format(named(keywords, rng)), text)


def named(keywords: list[str], rng: random.Random) -> str:
    """Return one to three of the keywords as a phrase: "a fox and a queen"."""
    count = min(len(keywords), rng.choice((1, 1, 1, 2, 2, 3)))
    words = [with_article(word) for word in keywords[:count]]
    rng.shuffle(words)
    return words[0] if count == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def opening_conversations(
    sections: list[Section], frequencies: Counter[str], rng: random.Random
) -> Iterator[list[Turn]]:
    """Yield the beginnings of tales once more each, since they are what most requests ask for."""
    for section in sections:
        for passage in passages_of(section, rng, 300, 1300):
            is_opening = bool(OPENING.match(passage.text)) or (passage.is_start and not DEPENDENT.match(passage.text))
            if is_opening and len(passage.text) < 1500:
                yield [answered(Passage(passage.text, True), frequencies, rng)]
