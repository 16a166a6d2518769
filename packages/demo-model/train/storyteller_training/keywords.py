"""Finds what a passage is about, and can retell it about another animal or person."""

from __future__ import annotations

import random
import re
from collections import Counter


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ANIMALS = _words(
    "fox wolf bear cat dog lion tiger frog mouse bird goose horse snake dragon hen rabbit hare donkey goat pig cow "
    "crow raven owl eagle swan duck fish monkey rat toad bee ant spider stag lamb sheep elephant nightingale"
)
WOMEN = (
    "Alice",
    "Dorothy",
    "Mary",
    "Gerda",
    "Wendy",
    "Martha",
    "Gretel",
    "Mombi",
    "Ozma",
    "Glinda",
    "Thumbelina",
    "Elsie",
)
MEN = (
    "Dickon",
    "Colin",
    "Peter",
    "Hans",
    "Jack",
    "Mowgli",
    "Kay",
    "Tip",
    "John",
    "Tom",
    "Aladdin",
    "Klaus",
    "Ben",
    "Hook",
)
OTHER_WOMEN = ("Anna", "Lily", "Rose", "Clara", "Emma", "Lucy", "Sophie", "Ella", "Nora", "Maria", "Ruth", "Ida")
OTHER_MEN = ("Max", "Paul", "Oscar", "Henry", "Leo", "David", "Sam", "Felix", "Robin", "Arthur", "Simon", "Martin")
THINGS = _words(
    "king queen prince princess witch wizard fairy giant dwarf soldier tailor miller fisherman shoemaker hunter "
    "magician sorcerer shepherd beggar thief robber merchant woodcutter gardener cook sailor pirate mermaid emperor "
    "stepmother grandmother mother father daughter son brother sister boy girl knight troll ogre baker peasant farmer "
    "castle palace forest wood garden sea river mountain island cave tower mill village city ship boat house "
    "ring crown sword lamp mirror apple rose tree flower star moon sun snow winter spring gold treasure key door "
    "golden egg shoe cloak feather spindle box bag stone bridge fire wind storm night dream song wish riddle feast "
    "wedding scarecrow lion balloon robin caterpillar nightingale tin kitchen table cup nut bread cake"
)
NOUNS = tuple(dict.fromkeys((*ANIMALS, *THINGS)))
PEOPLE = (*WOMEN, *MEN)
UNCOUNTED = frozenset({"gold", "snow", "winter", "spring", "fire", "wind", "bread", "tin", "golden", "night"})
UNIQUE = frozenset({"sea", "sun", "moon", "forest", "wood", "wind", "snow", "night"})
PLURALS = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "fish": "fish", "sheep": "sheep", "thief": "thieves"}
WORD = re.compile(r"[A-Za-z][a-z]+")


def plural(noun: str) -> str:
    """Return the plural of one of the listed nouns."""
    if noun in PLURALS:
        return PLURALS[noun]
    if noun.endswith(("x", "ch", "sh", "s")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


SINGULARS = {plural(noun): noun for noun in NOUNS} | {noun: noun for noun in NOUNS}


def keywords_of(passage: str, frequencies: Counter[str], limit: int = 4) -> list[str]:
    """Return up to `limit` nouns and names of a passage, the most telling (often here, seldom elsewhere) first."""
    counts = Counter[str]()
    for word in WORD.findall(passage):
        if word in PEOPLE:
            counts[word] += 1
        elif word.lower() in SINGULARS:
            counts[SINGULARS[word.lower()]] += 1
    counts.pop("golden", None)
    return sorted(counts, key=lambda word: -counts[word] / (40 + frequencies[word]) ** 0.5)[:limit]


def with_article(word: str) -> str:
    """Return a noun as one names it in a request: "a fox", "an owl", "the sea", "gold", "Alice"."""
    if word[0].isupper():
        return word
    if word in UNIQUE:
        return f"the {word}"
    if word in UNCOUNTED:
        return word
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def recast(passage: str, keywords: list[str], rng: random.Random) -> tuple[str, list[str]]:
    """Retell a passage with its first animal, or its first person, exchanged for another one."""
    for position, keyword in enumerate(keywords):
        if keyword in ANIMALS:
            other = rng.choice([animal for animal in ANIMALS if animal not in keywords])
            pairs = {plural(keyword): plural(other), keyword: other}
        elif keyword in PEOPLE:
            other = rng.choice(OTHER_WOMEN if keyword in WOMEN else OTHER_MEN)
            pairs = {keyword: other}
        else:
            continue
        return _exchanged(passage, pairs), [*keywords[:position], other, *keywords[position + 1 :]]
    return passage, keywords


def _exchanged(passage: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        passage = re.sub(rf"\b{old}\b", new, passage)
        passage = re.sub(rf"\b{old.capitalize()}\b", new.capitalize(), passage)
        passage = re.sub(rf"\b([Aa])n? ({new})\b", _article_fixed, passage, flags=re.IGNORECASE)
    return passage


def _article_fixed(match: re.Match[str]) -> str:
    ending = "n" if match[2][0].lower() in "aeiou" else ""
    return f"{match[1]}{ending} {match[2]}"
