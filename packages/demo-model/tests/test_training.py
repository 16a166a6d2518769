"""The training scripts clean text, make requests that fit their answers, and export what they trained."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[1] / "train"


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    if not TRAIN.is_dir():
        pytest.skip("the training scripts are not part of this installation")
    monkeypatch.syspath_prepend(str(TRAIN))


BOOK = """\
*** START OF THE PROJECT GUTENBERG EBOOK ***

THE FOX AND THE CROW

A crow sat upon a tree,
and _a fox_ came by.

‘Good day,’ said the fox; ‘how do you do?’ That was the fox’s way.

12

The crow did not ans-

13

wer. She had a piece of cheese in her beak, and she meant to keep it for
herself, whatever the fox might say. So she sat quite still, and looked the
other way, and thought of her supper, and of the long winter nights.(1)

(1) Old tale.

    Cheese is good,
    Said the crow,
    In the wood.

At last the fox went home, and told his wife that the cheese was bad, and
that nobody but a crow would care to eat it.

*** END OF THE PROJECT GUTENBERG EBOOK ***
"""


def test_a_book_becomes_clean_paragraphs() -> None:
    from storyteller_training.corpus import sections_of

    (section,) = sections_of("book", BOOK)
    assert section.paragraphs[0] == "A crow sat upon a tree, and a fox came by."
    assert section.paragraphs[1] == '"Good day," said the fox; "how do you do?" That was the fox\'s way.'
    assert section.paragraphs[2].startswith("The crow did not answer. She had")
    assert section.paragraphs[2].endswith("winter nights.")
    assert section.paragraphs[3] == "Cheese is good,\nSaid the crow,\nIn the wood."
    assert len(section.paragraphs) == 5


def test_held_out_paragraphs_are_in_no_training_section() -> None:
    from storyteller_training.corpus import Section, split_sections

    sections = [Section("book", tuple(f"{name}{i}" for i in range(70))) for name in "ab"]
    training, validation = split_sections(sections, every=50, held=5)
    kept = [paragraph for section in training for paragraph in section.paragraphs]
    held = [paragraph for section in validation for paragraph in section.paragraphs]
    assert sorted(kept + held) == sorted(paragraph for section in sections for paragraph in section.paragraphs)
    assert len(held) == 10


def test_keywords_name_what_is_frequent_here_and_rare_elsewhere() -> None:
    from storyteller_training.keywords import keywords_of

    passage = "The dragon saw the king. The dragons were many, and Alice was one."
    assert keywords_of(passage, Counter({"king": 1000, "Alice": 400}))[0] == "dragon"


@pytest.mark.parametrize(
    ("word", "phrase"), [("fox", "a fox"), ("owl", "an owl"), ("sea", "the sea"), ("gold", "gold"), ("Alice", "Alice")]
)
def test_a_keyword_is_named_as_one_says_it(word: str, phrase: str) -> None:
    from storyteller_training.keywords import with_article

    assert with_article(word) == phrase


def test_a_recast_tale_is_about_another_animal_throughout() -> None:
    from storyteller_training.keywords import recast

    text, keywords = recast("A fox met two foxes. The Fox ran.", ["fox"], random.Random(3))
    assert keywords != ["fox"]
    assert "fox" not in text.lower()
    assert text.lower().count(keywords[0][:3]) >= 2


def test_the_section_is_used_once_and_in_order() -> None:
    from storyteller_training.conversations import passages_of
    from storyteller_training.corpus import Section

    section = Section("book", tuple(f"He said {i} words to the king." for i in range(40)))
    passages = list(passages_of(section, random.Random(1)))
    assert "\n\n".join(passage.text for passage in passages) == "\n\n".join(section.paragraphs)
    assert [passage.is_start for passage in passages] == [True] + [False] * (len(passages) - 1)


def test_only_answers_are_targets_and_the_form_is_the_chat_template() -> None:
    pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    from storyteller_training.batches import IGNORED, DocumentEncoder
    from storyteller_training.conversations import Turn

    from llmstack_demo_model import model_path

    tokenizer = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    ids, targets = DocumentEncoder(tokenizer).conversation([Turn("Hello", "Good day!")])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>Hello<|storyteller|>Good day!<|endoftext|>"
    answer = [target for target in targets if target != IGNORED]
    assert tokenizer.decode(answer, skip_special_tokens=False) == "Good day!<|endoftext|>"


def test_the_exported_network_is_the_trained_one(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from storyteller_training.bpe import train_tokenizer
    from storyteller_training.export import export_model
    from storyteller_training.gpt2 import ModelConfig, Storyteller

    tokenizer = train_tokenizer(["once upon a time"] * 3, 280)
    model = Storyteller(ModelConfig(tokenizer.get_vocab_size(), 16, 32, 2, 2)).eval()
    export_model(model, tokenizer, tmp_path, torch.float32)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path)).eval()
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-5)


def test_the_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    pytest.importorskip("torch")
    from storyteller_training.loop import TrainingConfig, learning_rate_at

    config = TrainingConfig(num_steps=100, num_decay_steps=20, num_warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate_at(step, config) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert set(rates[10:81]) == {1.0}
    assert rates[81:] == sorted(rates[81:], reverse=True)
    assert rates[-1] < 0.03
