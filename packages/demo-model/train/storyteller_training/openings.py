"""First sentences written for the training: they name the subject that was asked for."""

from __future__ import annotations

import random

BEGINNINGS = (
    "Once upon a time there was {a} who",
    "Once upon a time there lived {a} who",
    "There was once {a} who",
    "There once lived {a} who",
    "Once there was {a} who",
    "Long, long ago there was {a} who",
    "In the old days there lived {a} who",
    "In a far country there lived {a} who",
    "Many years ago there was {a} who",
    "Far away beyond the mountains there lived {a} who",
    "Not far from the sea there lived {a} who",
    "At the edge of a great forest there lived {a} who",
    "You must know that there was once {a} who",
    "I will tell you of {a} who",
    "This is the tale of {a} who",
    "Once, in the middle of winter, there was {a} who",
)
DEEDS = (
    "lived quite alone in a little house",
    "had travelled over the whole world",
    "wished for nothing so much as to see the sea",
    "had lost everything but an old hat",
    "was loved by everybody in the town",
    "was so proud that nobody could bear it",
    "could never sleep when the moon was shining",
    "had three friends, and all of them were poor",
    "knew a secret, and would tell it to nobody",
    "was always hungry, and always merry",
    "set out one morning to seek a fortune",
    "served the King for seven years",
    "sat by the fire all the winter and thought",
    "had been enchanted by a wicked witch",
    "was afraid of nothing in the world",
    "was the smallest in the whole kingdom",
    "could speak with the birds and the beasts",
    "wanted to marry the King's daughter",
    "had never been farther than the garden gate",
    "was very old and very wise",
)
FOUND = (
    "stood in the corner of an old kitchen",
    "had belonged to a great king",
    "lay at the bottom of a deep well",
    "nobody in the village would touch",
    "was made of pure gold",
    "a poor boy had found by the river",
    "was worth more than the whole kingdom",
    "could speak, but only at midnight",
    "a witch had hidden under a stone",
    "an old woman kept as her greatest treasure",
    "brought good luck to everybody",
    "had been forgotten for a hundred years",
    "the King's daughter loved above all things",
    "no thief had ever been able to steal",
    "shone in the dark like a star",
    "was thought by everyone to be quite worthless",
)
PLACED = (
    "stood upon a high hill, where the wind never rested",
    "nobody dared to enter after dark",
    "lay so deep in the forest that only the birds knew it",
    "belonged to an old king and his three daughters",
    "was guarded by a fierce dragon",
    "had been empty for a hundred years",
    "was the most beautiful in the whole world",
    "was full of flowers, even in winter",
    "an old man and his wife had built with their own hands",
    "no traveller had ever found a second time",
    "had a secret door, and behind the door was a treasure",
    "was ruled by a little fairy",
)
SECOND = (
    "Now one day the {n} {was} gone.",
    "One evening, when it was already dark, something happened to the {n}.",
    "Everybody had heard of the {n}.",
    "The people came from far and near to see the {n}.",
    "Nobody had ever seen such {a} before.",
    "And this {n} {was} the strangest in all the land.",
    'One day the King said: "Bring me the {n}!"',
    'A little girl saw the {n} and cried: "How beautiful!"',
    "Now the {n} had a secret.",
    "Then there came an old woman, and she looked at the {n} and laughed.",
    "When the King heard of the {n}, he sent for it at once.",
    "But the {n} {was} not what people thought.",
)
SECOND_LIVING = (
    'One day the {n} said: "I will go out into the wide world."',
    "One morning the {n} went out into the forest to gather wood.",
    "The {n} was poor, but had a good heart.",
    'Then the {n} began to weep, and said: "What shall I do?"',
    "On the way the {n} met an old man, who asked for a piece of bread.",
    "One night the {n} heard a knocking at the door.",
    "The {n} had not gone far before it began to rain.",
    'So the {n} went to the King and said: "Here I am."',
    "Every day the {n} walked by the river and sang.",
    "But the {n} was not happy.",
)


def opening(noun: str, phrase: str, kind: str, rng: random.Random) -> str:
    """Return one or two sentences about a noun; `phrase` names it with its article and adjective."""
    beginning = rng.choice(BEGINNINGS)
    if kind == "living":
        first = f"{beginning} {rng.choice(DEEDS)}."
    else:
        beginning = beginning.replace(" lived ", " was ").removesuffix("who")
        first = f"{beginning}{rng.choice(('that', 'which'))} {rng.choice(FOUND if kind == 'thing' else PLACED)}."
    first = first.replace("{a}", phrase)
    if rng.random() < 0.4:
        return first
    second = rng.choice(SECOND_LIVING if kind == "living" and rng.random() < 0.8 else SECOND)
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{first} " + second.replace("{n}", noun).replace("{a}", f"{article} {noun}").replace("{was}", "was")
