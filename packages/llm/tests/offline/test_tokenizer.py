"""The tokenizer that `LLM.get_tokenizer` returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_llm import LLM, SamplingParams
from llmstack_llm.testing import write_model_folder
from llmstack_types import InvalidRequestError

CONVERSATION = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), runner="echo", num_kv_blocks=32) as made:
        yield made


def test_a_conversation_is_rendered_as_the_chat_does(llm: LLM):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.chat(CONVERSATION, SamplingParams(max_tokens=1), use_tqdm=False)
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    assert (text, ids) == (output.prompt, output.prompt_token_ids)
    assert tokenizer.apply_chat_template([CONVERSATION, CONVERSATION], tokenize=False, add_generation_prompt=True) == [
        text, text
    ]  # fmt: skip
    own = tokenizer.apply_chat_template(
        CONVERSATION, tokenize=False, chat_template="{{ messages[0].content }}{{ mood }}", mood="!"
    )
    assert own == "ab!"
    with pytest.raises(InvalidRequestError):
        tokenizer.apply_chat_template([{"content": "x"}])


def test_texts_become_ids_as_encode_makes_them(llm: LLM):
    tokenizer = llm.get_tokenizer()
    one, other = tokenizer.encode("ab"), tokenizer.encode("cde")
    assert tokenizer("ab") == {"input_ids": one, "attention_mask": [1] * len(one)}
    assert tokenizer(["ab", "cde"])["input_ids"] == [one, other]
    assert len(tokenizer) == tokenizer.vocab_size
    assert tokenizer.eos_token == tokenizer.named_tokens.get("eos_token")
    assert tokenizer.bos_token == tokenizer.named_tokens.get("bos_token")
