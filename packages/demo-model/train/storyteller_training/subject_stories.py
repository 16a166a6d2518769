"""Makes stories that begin with the subject of their request, of passages whose own subject is exchanged for it."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from storyteller_training.conversations import DEPENDENT, NEXT_REQUESTS, PASSAGE_REQUESTS, STORY_REQUESTS, Turn
from storyteller_training.corpus import Section
from storyteller_training.keywords import NOUNS, UNCOUNTED, UNIQUE, with_article
from storyteller_training.nouns import (
    ALL_CREATURES,
    PERSONS,
    PLACES,
    THINGS,
    TRAINED,
    made_up_noun,
    plural_of,
    random_noun,
    words,
)
from storyteller_training.openings import opening

SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)\s+(?=[A-Z\"])|(?<=[.!?]\")\s+(?=[A-Z\"])")
# Words that are a verb or something else as often as a noun: to exchange them would break sentences.
AMBIGUOUS = frozenset(
    words("""
saw rose well fly bear swallow watch swift swing duck count cook match wish dream spring fire fool bow ring string
stick iron pan general page minister tick lock fence hook shed tin golden glass file mine yard kid rake brush spur
park bean seed leaf rest night winter summer wind table stone star wood forest sea sun moon snow lay ram lark hound
slip stamp point light head cap card club cover button bench train plank plate drawer driver ruler lord lady maid
mother father daughter son brother sister boy girl wife uncle aunt box bag key door song riddle feast bread cloud host
pole peak path road street grave field hall lane lead desk pin pen pie mat bat ear-ring pool brook
""")
)
LIVING_OLD = words("""
king queen prince princess witch wizard fairy giant dwarf soldier tailor miller fisherman shoemaker hunter magician
sorcerer shepherd beggar thief robber merchant woodcutter gardener sailor pirate mermaid emperor stepmother
grandmother knight troll ogre baker peasant farmer scarecrow
""")
PLACES_OLD = words("castle palace garden river mountain island cave tower mill village city house bridge kitchen")
LIVING = frozenset((*ALL_CREATURES, *PERSONS, *LIVING_OLD))
LOCAL = frozenset((*PLACES, *PLACES_OLD))
KNOWN = frozenset(TRAINED)
ADJECTIVES = (
    "old", "little", "young", "great", "poor", "brave", "clever", "golden", "magic", "lazy", "lonely", "wicked",
    "beautiful", "strange", "big", "tiny", "white", "black", "red", "green", "silver", "happy", "sad", "foolish",
)  # fmt: skip
MORE_REQUESTS = (
    "Tell me about {}, please.",
    "Tell me a short story about {}.",
    "Tell me a long story about {}.",
    "Tell me another story about {}.",
    "Tell me a funny story about {}.",
    "Tell me a bedtime story about {}.",
    "Could you tell a story about {}?",
    "Give me a story about {}.",
    "Make up a story about {}.",
    "I want a story about {}!",
    "Now one about {}, please.",
    "a story about {}",
    "story about {}",
    "Story: {}",
    "{}, please.",
    "Once upon a time there was {}. What happened?",
    "Write me a tale with {} in it.",
    "Let me hear of {}.",
    "hello, tell me a story about {}",
    "Hi! Can you tell me about {}?",
)
REQUESTS = (*(STORY_REQUESTS[:4] * 4), *STORY_REQUESTS, *MORE_REQUESTS, *PASSAGE_REQUESTS[:5])


@dataclass(frozen=True, slots=True)
class Site:
    """A sentence that holds a noun, and where it stands."""

    section: int
    paragraph: int
    sentence: int
    noun: str


def kind_of(noun: str) -> str:
    """Tell whether a noun lives, is a place, or is a thing."""
    return "living" if noun in LIVING else "place" if noun in LOCAL else "thing"


def pattern_of(noun: str) -> re.Pattern[str]:
    """Return what matches a noun or its plural as a whole word."""
    return re.compile(rf"(?<![\w-])({re.escape(plural_of(noun))}|{re.escape(noun)})(?![\w-])", re.IGNORECASE)


def exchanged(text: str, old: str, new: str) -> str:
    """Put one noun in another's place, with its plural, its article and a capital where a sentence begins."""

    def replaced(match: re.Match[str]) -> str:
        is_plural = match[1].lower() == plural_of(old) and plural_of(old) != old
        word = plural_of(new) if is_plural else new
        before = text[: match.start()].rstrip()
        starts = not before or (before[-1] in '.!?"' and match[1][0].isupper())
        return word.capitalize() if starts else word

    text = pattern_of(old).sub(replaced, text)
    return re.sub(
        rf"\b([Aa])n? ({re.escape(new)})\b", lambda m: f"{m[1]}{'n' if m[2][0] in 'aeiou' else ''} {m[2]}", text
    )


class SubjectStories:
    """Draws requests and stories from the sections of the books."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._texts = [[SENTENCE_END.split(p) for p in section.paragraphs] for section in sections]
        self._sites: dict[str, list[Site]] = defaultdict(list)
        nouns = {noun: noun for noun in TRAINED if noun not in AMBIGUOUS and noun not in UNCOUNTED | UNIQUE}
        for at, paragraphs in enumerate(self._texts):
            for number, sentences in enumerate(paragraphs):
                for index, sentence in enumerate(sentences):
                    if DEPENDENT.match(sentence) or "\n" in sentence:
                        continue
                    for word in set(re.findall(r"(?<![\w-])[a-z]+(?![\w-])", sentence.lower())):
                        if word in nouns:
                            self._sites[word].append(Site(at, number, index, word))
        self._nouns = sorted(self._sites)
        # Frequent nouns more often, but not in proportion: every noun has passages of its own kind.
        self._weights = [len(self._sites[noun]) ** 0.7 for noun in self._nouns]

    def conversation(self, rng: random.Random) -> list[Turn]:
        """Return a request about a subject and a story that begins with it, sometimes in two parts."""
        site, text = self._passage(rng)
        subject = self._subject_for(site.noun, rng)
        text = exchanged(text, site.noun, subject)
        asked = [subject]
        phrase = article_phrase(subject, rng) if rng.random() < 0.25 else with_article(subject)
        if rng.random() < 0.5:
            first = opening(subject, phrase, kind_of(subject if subject in KNOWN else site.noun), rng)
            if rng.random() < 0.12:
                other = random_noun(rng)
                asked.append(other)
                both = f"Once upon a time there was {phrase} and {with_article(other)}."
                first = both if rng.random() < 0.5 else f"{first} There was also {with_article(other)}."
            text = f"{first} {text}"
        request = rng.choice(REQUESTS).format(request_phrase(asked, phrase, text, rng))
        subjects = tuple(form for noun in asked for form in (plural_of(noun), noun))
        paragraphs = text.split("\n\n")
        if len(paragraphs) > 1 and rng.random() < 0.15:
            cut = rng.randint(1, len(paragraphs) - 1)
            parts = ("\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:]))
            return [Turn(request, parts[0], subjects), Turn(rng.choice(NEXT_REQUESTS), parts[1], subjects)]
        return [Turn(request, text, subjects)]

    def _passage(self, rng: random.Random) -> tuple[Site, str]:
        """Choose a passage that begins with a sentence about a noun; of a few the one that names it most often."""
        noun = rng.choices(self._nouns, self._weights)[0]
        found = [(site, self._text_from(site, rng)) for site in rng.choices(self._sites[noun], k=4)]
        pattern = pattern_of(noun)
        return max(found, key=lambda pair: min(len(pattern.findall(pair[1])), 4))

    def _text_from(self, site: Site, rng: random.Random) -> str:
        """Return the text from a site's sentence on, to the end of a paragraph or a sentence."""
        target = rng.randint(120, 600)
        paragraphs = self._texts[site.section]
        parts: list[str] = []
        length = 0
        for number in range(site.paragraph, len(paragraphs)):
            sentences = paragraphs[number][site.sentence if number == site.paragraph else 0 :]
            kept: list[str] = []
            for sentence in sentences:
                kept.append(sentence)
                length += len(sentence)
                if length > target + 200:
                    break
            parts.append(" ".join(kept))
            if length >= target:
                break
        return "\n\n".join(parts)

    def _subject_for(self, noun: str, rng: random.Random) -> str:
        """Return what takes a noun's place: mostly one of its kind, sometimes any noun, a made-up one, or itself."""
        draw = rng.random()
        if draw < 0.08:
            return noun
        if draw < 0.2:
            return made_up_noun(rng)
        if draw < 0.35:
            chosen = random_noun(rng)
        else:
            kind = kind_of(noun)
            pool = {"place": PLACES, "thing": THINGS, "living": rng.choice((ALL_CREATURES, PERSONS))}[kind]
            chosen = rng.choice(pool if rng.random() < 0.85 else NOUNS)
        return noun if chosen in UNCOUNTED or chosen in UNIQUE else chosen


def article_phrase(noun: str, rng: random.Random) -> str:
    """Return a noun with an adjective and the article of that: "an old fox"."""
    return with_article(f"{rng.choice(ADJECTIVES)} {noun}")


def request_phrase(asked: list[str], phrase: str, text: str, rng: random.Random) -> str:
    """Return how a request names its subjects: as the story does, with "the", in the plural, or bare."""
    draw = rng.random()
    first = asked[0]
    if draw < 0.1 and len(asked) == 1:
        return plural_of(first)
    if draw < 0.16:
        return f"the {first}"
    if draw < 0.2:
        return first
    if phrase != with_article(first) and phrase not in text and rng.random() < 0.5:
        phrase = with_article(first)
    if len(asked) == 1:
        return phrase
    names = [phrase, with_article(asked[1])]
    rng.shuffle(names)
    return " and ".join(names)
