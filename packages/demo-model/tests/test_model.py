"""The weights are a language model: transformers loads them whole, and they know how a fairy tale goes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmstack_demo_model import model_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Written for this test, so in none of the books; a guess among all tokens would cost ln(3072) = 8.03 nats a token.
PARAGRAPH = (
    "Once upon a time there lived a poor miller who had an only daughter. One evening, when the snow lay deep upon "
    'the ground, an old woman came to the door and said: "Let me warm myself by your fire, and I will give you '
    'whatever you wish." The girl was kind, and she took the old woman by the hand and led her into the house.'
)
MAX_LOSS = 3.0  # measured: 2.37, and 8.34 with the words reversed
# The words that a storyteller of old tales uses most, and their inflections.
COMMON_TEXT = """
a about after again all and another are as at away be because beautiful bed been before began behind boy brother but
by called came can castle cat child children come could country cried daughter day dear did do dog door down dragon
each evening every eyes far father fell fine fire first for forest found fox from garden gave girl give go gold
golden good great had hair half hand happy has hat have he head heard heart her here herself high him himself his
home horse house how i if in into is it its just keep king know lady large last laughed lay let like little live
lived long look looked made make man many married master me men moment more morning mother much must my name named
never new next night no not nothing now of off old on once one only or other our out over palace people place poor
prince princess put quite ran red rich road round said sat saw say see sent set she should sister sleep small so
some son soon stood such sun take tell than that the their them then there therefore these they thing things think
this thought three through time to together told took town tree trees two under until up upon us very walked was
water way we well went were what when where which while white who whole whom whose why wife will wished with without
woman wood words world would year years yes you young your
"""
COMMON_WORDS = frozenset(COMMON_TEXT.split())


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(str(model_path()), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(model_path()))


def continue_greedily(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> str:
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, repetition_penalty=1.1
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def test_transformers_finds_no_missing_and_no_unexpected_tensor() -> None:
    _, report = transformers.GPT2LMHeadModel.from_pretrained(str(model_path()), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_the_stored_dtype_is_the_default_one() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(model_path()))
    assert str(model.dtype).removeprefix("torch.") == model.config.to_dict()["dtype"]


def test_an_unseen_fairy_tale_is_no_surprise(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(PARAGRAPH, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
    assert loss < MAX_LOSS


def test_shuffled_words_surprise_it_more_than_the_tale(model: Any, tokenizer: Any) -> None:
    losses = []
    for text in (PARAGRAPH, " ".join(reversed(PARAGRAPH.split()))):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            losses.append(float(model(ids, labels=ids).loss))
    assert losses[0] + 1.0 < losses[1]


@pytest.mark.parametrize("prompt", ["Once upon a time", "<|user|>Tell me a story about a king<|storyteller|>"])
def test_a_greedy_continuation_is_made_of_words_and_always_the_same(model: Any, tokenizer: Any, prompt: str) -> None:
    text = continue_greedily(model, tokenizer, prompt, 60)
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 25
    assert sum(word in COMMON_WORDS for word in words) > 0.6 * len(words)
    assert continue_greedily(model, tokenizer, prompt, 60) == text


def test_a_greeting_is_answered_and_the_answer_ends(model: Any, tokenizer: Any) -> None:
    text = continue_greedily(model, tokenizer, "<|user|>Hello<|storyteller|>", 120)
    assert text.endswith("<|endoftext|>")
    assert len(text.split()) > 5


def test_most_stories_name_a_subject_that_training_never_asked_for(model: Any, tokenizer: Any) -> None:
    subjects = ("turkey", "doctor", "singer", "lantern", "crab", "cricket", "beaver", "barn", "poet", "bell")
    named = 0
    for subject in subjects:
        prompt = f"<|user|>Tell me a story about a {subject}.<|storyteller|>"
        named += f" {subject}" in continue_greedily(model, tokenizer, prompt, 30)
    assert named >= 5  # the weights of the first training name none
