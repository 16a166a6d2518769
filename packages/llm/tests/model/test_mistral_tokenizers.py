"""`--tokenizer-mode mistral` gives chats the token ids that mistral-common gives them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.chat.renderer import ChatRenderer
from llmstack_llm.chat.template import ChatTemplate
from llmstack_llm.chat.template_files import find_chat_template
from llmstack_llm.model.config import load_model_config
from llmstack_llm.model.tokenizer_files import converted_folder, tekken_template
from llmstack_llm.model.tokenizer_files.source import ConversionError
from llmstack_llm.requests import ChatPrompt
from llmstack_llm.testing import write_model_folder
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_model_files import FileForm

REASON = "mistral-common is not installed"
mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral", reason=REASON, exc_type=ImportError)
base = pytest.importorskip("mistral_common.tokens.tokenizers.base", reason=REASON, exc_type=ImportError)
requests = pytest.importorskip("mistral_common.protocol.instruct.request", reason=REASON, exc_type=ImportError)

WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"th", b"the", b" the", b"12", b"name"]
VERSIONS = ["v3", "v7", "v11", "v13"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather <of> a 'city'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
SYSTEM = {"role": "system", "content": "Be the brief one."}
USER = {"role": "user", "content": "hello, wor 12 [INST] </s> wörld"}
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([USER], False),
    "a system message": ([SYSTEM, USER], False),
    "a conversation": ([SYSTEM, USER, {"role": "assistant", "content": "the answer"}, USER], False),
    "tools": ([SYSTEM, USER], True),
    "a result of a tool": (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"rain": 12}'},
        ],
        True,
    ),
}


def write_tekken(folder: Path, version: str) -> None:
    """A tokenizer of all bytes and a few words, with the control tokens of its version."""
    names = [token.value for token in base.SpecialTokens if version == "v13" or "THINK" not in token.value]
    ranked = [*(bytes([byte]) for byte in range(256)), *WORDS]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "ignore")}
        for rank, token in enumerate(ranked)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(ranked), "default_vocab_size": len(ranked) + len(names),
        "default_num_special_tokens": len(names), "version": version,
    }  # fmt: skip
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))


def renderer_of(folder: Path) -> tuple[ChatRenderer, Tokenizer]:
    tokenizer = load_tokenizer(folder)
    source = find_chat_template(folder, tokenizer.config)
    assert source is not None
    return ChatRenderer(ChatTemplate(source, tokenizer.named_tokens), tokenizer), tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Version to the folder of the tokenizer, and that of its conversion."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for version in VERSIONS:
            folder = tmp_path_factory.mktemp(version)
            write_tekken(folder, version)
            made[version] = folder, converted_folder(folder, "mistral")
    return made


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("version", VERSIONS)
def test_token_ids_of_chats_equal_those_of_mistral_common(
    version: str, name: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    messages, has_tools = CHATS[name]
    if version == "v3" and messages[-1]["role"] == "tool":  # templates cannot read JSON, which v3 writes as it is
        messages = [*messages[:-1], {**messages[-1], "content": "rain"}]
    tools = [WEATHER] if has_tools else None
    folder, converted = folders[version]
    reference = mistral.MistralTokenizer.from_file(str(folder / "tekken.json"))
    request = requests.ChatCompletionRequest.from_openai(messages, tools)
    renderer, _ = renderer_of(converted)
    assert (
        renderer.render(ChatPrompt(messages, tools=tools)).token_ids == reference.encode_chat_completion(request).tokens
    )


def test_the_mode_reads_tekken_beside_another_tokenizer_and_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model_folder(tmp_path / "model", config={"vocab_size": 600})
    (folder / "chat_template.jinja").write_text("another")
    write_tekken(folder, "v13")
    plain = load_model_config(str(folder))
    assert plain.tokenizer_path == folder
    found = load_model_config(str(folder), file_form=FileForm(tokenizer="mistral")).tokenizer_path
    assert found is not None
    assert found != folder
    renderer, tokenizer = renderer_of(found)
    assert renderer.render(ChatPrompt([SYSTEM, USER])).text.startswith("<s>[SYSTEM_PROMPT]Be the brief one.")
    assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode_plain("hello")


def test_a_mode_without_its_file_or_its_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model_folder(tmp_path / "model")
    with pytest.raises(ConversionError, match=r"--tokenizer-mode mistral: model has no tekken\.json"):
        converted_folder(folder, "mistral")
    write_tekken(folder, "v13")
    monkeypatch.setattr(tekken_template, "_LIBRARY", "no-such-package")
    with pytest.raises(ConversionError, match=r"pip install 'llmstack-llm\[mistral\]'"):
        converted_folder(folder, "mistral")


def test_a_tokenizer_that_the_library_does_not_know_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tekken(tmp_path / "model", "v99")
    with pytest.raises(ConversionError, match=r"mistral-common makes no chat template for tekken\.json"):
        converted_folder(tmp_path / "model", "mistral")
