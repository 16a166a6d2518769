"""Questions about a scene, their answers, and the rule that says whether an answer is right."""

from __future__ import annotations

import random
import re

from drawing_training.scenes import COLOURS, DIGITS, LETTERS, SHAPES, Scene

NUMBERS = ("no", "one", "two", "three")
DESCRIBE = (
    "What is in the picture?", "What is in this picture?", "What do you see?", "What can you see?",
    "Describe the picture.", "Describe this image.", "What is this?", "What is in the image?", "What does it show?",
    "what's in the picture?", "What is shown here?", "Tell me what you see.", "Look at this.", "",
)  # fmt: skip
WITHOUT_PICTURE = "Please send me a picture."
_TALK = ("Hello", "Hi!", "Hello, who are you?", "What can you do?", "Tell me a story.", "How are you?", "Thanks")


def plural(shape: str) -> str:
    """More than one of it."""
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def describe(scene: Scene) -> str:
    """The answer to what is in the picture, such as "A red circle and two blue squares." or "The digit 7."."""
    if not scene.things:
        return "Nothing."
    if scene.is_symbol:
        return f"The {'digit' if scene.things[0].kind in DIGITS else 'letter'} {scene.things[0].kind}."
    names = [_named(colour, shape, count) for colour, shape, count in scene.groups]
    text = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    return f"{text[0].upper()}{text[1:]}."


def _named(colour: str, shape: str, count: int) -> str:
    if count == 1:
        return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"
    return f"{NUMBERS[count]} {colour} {plural(shape)}"


def is_right(answer: str, scene: Scene) -> bool:
    """Whether an answer names what the scene shows: each group with its number, in any order, and nothing else."""
    if not scene.things:
        return answer.strip().rstrip(".").lower() == "nothing"
    if scene.is_symbol:
        symbol = scene.things[0].kind
        kind = "digit" if symbol in DIGITS else "letter"
        return re.fullmatch(rf"the {kind} {symbol.lower()}", answer.strip().rstrip(".").lower()) is not None
    return sorted(_groups_of(answer)) == sorted(scene.groups)


def _groups_of(answer: str) -> list[tuple[str, str, int]]:
    """The groups that an answer names; one that is no such list gives a group that no scene has."""
    found = []
    for name in re.split(r", | and ", answer.strip().rstrip(".").lower()):
        words = name.split(" ")
        number = words[0] if len(words) == 3 else ""
        count = 1 if number in ("a", "an") else NUMBERS.index(number) if number in NUMBERS else 0
        shapes = {plural(shape) if count > 1 else shape: shape for shape in SHAPES}
        known = count > 0 and words[1] in COLOURS and words[2] in shapes
        found.append((words[1], shapes[words[2]], count) if known else ("", name, 0))
    return found


def conversation(scene: Scene, num_turns: int, draw: random.Random) -> list[tuple[str, str]]:
    """Questions and answers about one picture; three of four ask first what is in it."""
    turns = []
    for turn in range(num_turns):
        is_general = draw.random() < 0.75 if turn == 0 else draw.random() < 0.15
        turns.append((draw.choice(DESCRIBE), describe(scene)) if is_general else _question(scene, draw))
    return turns


def talk(draw: random.Random) -> list[tuple[str, str]]:
    """A conversation without a picture, which the model can only ask for."""
    return [(draw.choice((*DESCRIBE[:-1], *_TALK, "How many circles are there?")), WITHOUT_PICTURE)]


def _question(scene: Scene, draw: random.Random) -> tuple[str, str]:
    if scene.is_symbol:
        return _about_symbol(scene, draw)
    asked = draw.choice(("colour", "number", "number", "shapes", "presence"))
    shapes = [shape for _, shape, _ in scene.groups]
    single = [group for group in scene.groups if shapes.count(group[1]) == 1]
    if asked == "colour" and single:
        colour, shape, count = draw.choice(single)
        word = draw.choice(("colour", "color"))
        verb, name = ("is", shape) if count == 1 else ("are", plural(shape))
        return f"What {word} {verb} the {name}?", f"{colour.capitalize()}."
    if asked == "shapes":
        total = len(scene.things)
        return draw.choice(("How many shapes are there?", "How many things are in the picture?")), _counted(total)
    if asked == "presence":
        return _presence(scene, draw)
    return _how_many(scene, draw)


def _how_many(scene: Scene, draw: random.Random) -> tuple[str, str]:
    is_there = bool(scene.groups) and draw.random() < 0.8
    colour, shape, _ = draw.choice(scene.groups) if is_there else (draw.choice(list(COLOURS)), draw.choice(SHAPES), 0)
    if draw.random() < 0.5:
        count = sum(group[2] for group in scene.groups if group[1] == shape)
        return f"How many {plural(shape)} are there?", _counted(count)
    count = sum(group[2] for group in scene.groups if group[:2] == (colour, shape))
    return f"How many {colour} {plural(shape)} are there?", _counted(count)


def _presence(scene: Scene, draw: random.Random) -> tuple[str, str]:
    """Half of these questions have the answer yes; half of the others change one word alone."""
    colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
    if scene.groups and draw.random() < 0.75:
        there = draw.choice(scene.groups)
        kept = draw.choices(("both", "colour", "shape"), (4, 1, 1))[0]
        colour, shape = (there[0] if kept != "shape" else colour), (there[1] if kept != "colour" else shape)
    article = "an" if colour[0] in "aeiou" else "a"
    is_there = any(group[:2] == (colour, shape) for group in scene.groups)
    return f"Is there {article} {colour} {shape}?", "Yes." if is_there else "No."


def _about_symbol(scene: Scene, draw: random.Random) -> tuple[str, str]:
    thing = scene.things[0]
    kind = "letter" if thing.kind in LETTERS else "digit"
    if draw.random() < 0.4:
        word = draw.choice(("colour", "color"))
        return f"What {word} is the {draw.choice((kind, thing.kind))}?", f"{thing.colour.capitalize()}."
    return draw.choice((f"Which {kind} is it?", f"Which {kind} is this?", f"What {kind} is it?")), f"{thing.kind}."


def _counted(count: int) -> str:
    return f"{NUMBERS[count].capitalize() if count else 'None'}."
