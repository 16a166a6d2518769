"""The second training asks for stories whose subject can only be taken from the request, and the measure is sound."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[1] / "train"
TALE = (
    "Once there was a king who had a golden apple.",
    'The king said: "My apples are mine!" And the King went to bed. An old apple is no ring.',
    "In the morning the apple was gone, and nobody knew where it was. The king wept for his apple.",
)


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if not TRAIN.is_dir():
        pytest.skip("the training scripts are not part of this installation")
    monkeypatch.syspath_prepend(str(TRAIN))


def test_two_hundred_nouns_are_held_out_of_every_list_that_training_asks_for() -> None:
    from storyteller_training.keywords import NOUNS, PEOPLE
    from storyteller_training.nouns import HELD_OUT, TRAINED, made_up_noun

    assert len(set(HELD_OUT)) == 200
    assert not set(HELD_OUT) & {*TRAINED, *NOUNS, *PEOPLE}
    rng = random.Random(4)
    assert not set(HELD_OUT) & {made_up_noun(rng) for _ in range(2000)}


@pytest.mark.parametrize(
    ("old", "new", "text", "expected"),
    [
        ("king", "owl", "A king met two kings. Kings talk.", "An owl met two owls. Owls talk."),
        ("owl", "wolf", "The King heard an owl, owls and more.", "The King heard a wolf, wolves and more."),
        ("king", "clock", "The old King's kingdom had a king-fisher.", "The old clock's kingdom had a king-fisher."),
    ],
)
def test_a_subject_is_exchanged_with_its_plural_and_article_and_in_whole_words(
    old: str, new: str, text: str, expected: str
) -> None:
    from storyteller_training.subject_stories import exchanged

    assert exchanged(text, old, new) == expected


def test_every_story_names_what_was_asked_for_in_its_first_three_sentences() -> None:
    from storyteller_training.corpus import Section
    from storyteller_training.nouns import HELD_OUT
    from storyteller_training.subject_stories import SubjectStories
    from storyteller_training.subjects import beginning_of, mentions

    stories = SubjectStories([Section("book", TALE)])
    rng = random.Random(7)
    asked = set()
    for _ in range(200):
        turn = stories.conversation(rng)[0]
        subject = turn.subjects[1]
        asked.add(subject)
        assert turn.request is not None
        assert mentions(turn.request, subject)
        assert mentions(beginning_of(turn.answer), subject)
    assert len(asked) > 100
    assert not asked & set(HELD_OUT)


def test_the_tokens_of_a_subject_are_emphasized_and_no_others() -> None:
    pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    from storyteller_training.batches import EMPHASIZED, IGNORED, DocumentEncoder
    from storyteller_training.conversations import Turn

    from llmstack_demo_model import model_path

    tokenizer = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    turn = Turn("A badger, please.", "A badger met badgers. The badge was his.", ("badgers", "badger"))
    _, targets = DocumentEncoder(tokenizer).conversation([turn])
    emphasized = [target - EMPHASIZED for target in targets if target >= EMPHASIZED]
    assert tokenizer.decode(emphasized) == " badger badgers"
    answer = [target % EMPHASIZED for target in targets if target != IGNORED]
    assert tokenizer.decode(answer, skip_special_tokens=False) == f"{turn.answer}<|endoftext|>"


def test_a_mention_is_the_noun_its_plural_or_its_possessive_and_no_part_of_a_word() -> None:
    from storyteller_training.subjects import mentions

    assert mentions("Two Wolves came.", "wolf")
    assert mentions("The wolf's house.", "wolf")
    assert mentions("The policemen ran.", "policeman")
    assert not mentions("A clockwork toy.", "clock")


def test_only_three_sentences_count_as_the_beginning() -> None:
    from storyteller_training.subjects import beginning_of, named_again

    text = 'One. "Two!" said he. Three? A fox. The fox ran.'
    assert beginning_of(text) == 'One. "Two!" said he. '
    assert beginning_of("One fox") == "One fox"
    assert named_again(text, "fox")
    assert not named_again("A fox met a fox. It ran.", "fox")


def test_an_exported_folder_is_read_back_as_the_same_network(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from storyteller_training.bpe import train_tokenizer
    from storyteller_training.export import export_model, load_model
    from storyteller_training.gpt2 import ModelConfig, Storyteller

    tokenizer = train_tokenizer(["once upon a time"] * 3, 280)
    model = Storyteller(ModelConfig(tokenizer.get_vocab_size(), 16, 32, 2, 2, dropout=0.2))
    export_model(model, tokenizer, tmp_path, torch.float32)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
