"""The tokenizer keeps every text, and the chat template writes the form the model was trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_demo_model import model_path

tokenizers = pytest.importorskip("tokenizers")
sandbox = pytest.importorskip("jinja2.sandbox")
TOKENIZER = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
CONFIG = json.loads((model_path() / "tokenizer_config.json").read_text(encoding="utf-8"))
SPECIALS = ("<|endoftext|>", "<|user|>", "<|storyteller|>")
TEXTS = (
    "Once upon a time there was a fox.",
    "  two spaces,\n\nnew lines\tand a tab ",
    "“Curly” — ‘quotes’ … and dashes",
    "naïve café Ünïcödé 童话 сказка",
    "emoji 🐉👸🏽👨‍👩‍👧 and a zero\u200bwidth space",
    "",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Tell me a story. \n"}],
    [
        {"role": "user", "content": "Tell me a story about a fox."},
        {"role": "assistant", "content": "There was once a fox."},
        {"role": "user", "content": "What happened next?"},
    ],
)


def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Render as a server does: in a sandbox that cannot change what it is given."""
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CONFIG["chat_template"])
    text: str = template.render(messages=messages, add_generation_prompt=add_generation_prompt, eos_token=SPECIALS[0])
    return text


def literal_tokenizer() -> Any:
    """Return a tokenizer that reads special tokens in a text as ordinary characters."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_keeps_a_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_and_never_becomes_a_special_token(text: str) -> None:
    ids = literal_tokenizer().encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert not {0, 1, 2} & set(ids)


@pytest.mark.parametrize("special", SPECIALS)
def test_a_special_token_typed_by_a_user_is_text_when_specials_are_off(special: str) -> None:
    ids = literal_tokenizer().encode(f"a {special} b", add_special_tokens=False).ids
    assert not {0, 1, 2} & set(ids)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"a {special} b"


def test_no_token_is_added_at_the_beginning_or_the_end() -> None:
    with_specials = TOKENIZER.encode("Once upon a time", add_special_tokens=True).ids
    assert with_specials == TOKENIZER.encode("Once upon a time", add_special_tokens=False).ids
    assert len(with_specials) == 4


def test_the_special_tokens_have_the_first_ids() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIALS] == [0, 1, 2]


def test_one_request_is_rendered_as_in_training() -> None:
    assert render(CHATS[0]) == "<|user|>Hello<|storyteller|>"


def test_a_system_message_is_left_out_and_contents_are_trimmed() -> None:
    assert render(CHATS[1]) == "<|user|>Tell me a story.<|storyteller|>"


def test_every_finished_answer_ends_with_the_end_token() -> None:
    assert render(CHATS[2]) == (
        "<|user|>Tell me a story about a fox.<|storyteller|>There was once a fox.<|endoftext|>"
        "<|user|>What happened next?<|storyteller|>"
    )


def test_without_a_generation_prompt_nothing_follows_the_last_message() -> None:
    assert render(CHATS[0], add_generation_prompt=False) == "<|user|>Hello"


@pytest.mark.parametrize("messages", CHATS)
def test_the_template_reads_the_same_in_transformers(messages: list[dict[str, str]]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model_path()))
    for add_generation_prompt in (False, True):
        expected = render(messages, add_generation_prompt)
        options = {"add_generation_prompt": add_generation_prompt}
        assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert list(ids) == TOKENIZER.encode(expected, add_special_tokens=False).ids
