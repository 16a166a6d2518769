"""Answers carry signed receipts, and what was changed or computed otherwise shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import EngineArgs
from llmstack_llm.offline.keywords import own_options
from llmstack_model_files import adapter_digest
from llmstack_server.app import build_app
from llmstack_server.commands import ReceiptKeyCommand, VerifyCommand
from llmstack_server.commands import verify as verify_module
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import AnswerConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.testing.adapters import write_adapter
from llmstack_server.web.receipts import ReceiptError, check_signature, make_key, open_signer
from llmstack_types import SamplingParams

pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 7, "temperature": 0.5}
COMPLETION = {"prompt": ["Hello", "you"], "max_tokens": 5, "n": 2, "return_token_ids": True}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key(tmp_path / "key.pem")
    return tmp_path / "key.pem"


def signing_server(key_file: Path | None) -> Any:
    answers = AnswerConfig(receipt_key_file=None if key_file is None else str(key_file))
    return build_app(ready_state(FakeEngineClient(), HTTPConfig(answers=answers)))


async def receipt_of(key_file: Path) -> dict[str, Any]:
    answer = await call(signing_server(key_file), "POST", "/v1/completions", COMPLETION)
    return dict(answer.json()["receipt"])


async def test_answers_and_streams_carry_the_same_receipt_with_token_ids_for_who_asks(key_file: Path):
    app = signing_server(key_file)
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        whole = (await call(app, "POST", path, body)).json()
        events = (await call(app, "POST", path, body | {"stream": True})).events()
        receipts = [whole["receipt"], events[-2]["receipt"]]
        assert events[-2]["choices"] == []
        for receipt in receipts:
            check_signature(receipt)
            assert ("token_ids" in receipt["completions"][0]) is ("return_token_ids" in body)
        assert receipts[0]["answer"] == whole["id"]
        if "seed" in body:  # otherwise each request draws one
            assert receipts[0]["completions"] == receipts[1]["completions"]
    completions = receipts[0]["completions"]
    assert [(one["prompt"], one["index"]) for one in completions] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert bytes(completions[2]["token_ids"]) == b"youyo"
    conversations = CHAT | {"messages": [CHAT["messages"]] * 2}
    batch = (await call(app, "POST", "/v1/chat/completions/batch", conversations)).json()
    for receipt in batch["receipts"]:
        check_signature(receipt)
    assert (len(batch["receipts"]), "receipt" in batch) == (2, False)
    plain = signing_server(None)
    assert "receipt" not in (await call(plain, "POST", "/v1/completions", COMPLETION)).json()
    assert len((await call(plain, "POST", "/v1/chat/completions", CHAT | {"stream": True})).events()) == 7


async def test_messages_and_responses_carry_receipts_at_their_ends(key_file: Path):
    app = signing_server(key_file)
    message = {"messages": CHAT["messages"], "max_tokens": 5}
    whole = (await call(app, "POST", "/v1/messages", message)).json()
    events = (await call(app, "POST", "/v1/messages", message | {"stream": True})).events()
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert [event for event in events if "receipt" in event] == [last]
    response = {"input": "Hello", "max_output_tokens": 5}
    answer = (await call(app, "POST", "/v1/responses", response)).json()
    kept = (await call(app, "GET", f"/v1/responses/{answer['id']}")).json()
    streamed = (await call(app, "POST", "/v1/responses", response | {"stream": True})).events()
    ended = streamed[-1]["response"]
    assert all("receipt" not in event["response"] for event in streamed[:-1] if "response" in event)
    assert kept["receipt"] == answer["receipt"]
    started = events[0]["message"]["id"]
    for receipt, name in (
        (whole["receipt"], whole["id"]), (last["receipt"], started), (answer["receipt"], answer["id"]),
        (ended["receipt"], ended["id"]),
    ):  # fmt: skip
        check_signature(receipt)
        assert receipt["answer"] == name
        assert receipt["completions"][0]["num_tokens"] == 5
    plain = signing_server(None)
    assert "receipt" not in (await call(plain, "POST", "/v1/messages", message)).json()
    assert "receipt" not in (await call(plain, "POST", "/v1/responses", response)).json()


async def test_any_change_of_a_receipt_shows(key_file: Path):
    receipt = await receipt_of(key_file)
    for name in receipt:
        with pytest.raises(ReceiptError):
            check_signature(receipt | {name: [] if name == "completions" else "other"})
    for name in receipt["completions"][0]:
        changed = copy.deepcopy(receipt)
        changed["completions"][0][name] = [1] if name.endswith("_ids") else "other"
        with pytest.raises(ReceiptError):
            check_signature(changed)
    for name, value in (("token_ids", None), ("prompt_token_ids", 5), ("token_ids", "12")):
        forged = receipt | {"completions": [one | {name: value} for one in receipt["completions"]]}
        with pytest.raises(ReceiptError, match=f"completion 0: {name} is not a list"):
            check_signature(forged)
    without_ids = copy.deepcopy(receipt)
    for one in without_ids["completions"]:
        del one["token_ids"], one["prompt_token_ids"]
    check_signature(without_ids)


@pytest.mark.parametrize("fault", ["missing", "open to others", "no key", "another kind"])
def test_a_key_that_cannot_be_used_is_one_sentence(key_file: Path, fault: str):
    if fault == "missing":
        key_file.unlink()
    elif fault == "open to others":
        key_file.chmod(0o644)
    else:
        text = "x" if fault == "no key" else _elliptic_key()
        key_file.write_text(text)
    with pytest.raises(ServeError, match=r"^--receipts .*key\.pem: [^\n]*$"):
        open_signer(str(key_file))


def _elliptic_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*kinds).decode()


class EchoLLM:
    """Stands in for `LLM`: repeats the prompt, with another last token where a test sets one."""

    last_token: int | None = None
    contract = ""

    def __init__(self, model: str, **settings: Any) -> None:
        assert own_options(settings) == settings  # `LLM` takes them
        self.has_adapters = EngineArgs(model, **settings).enable_lora
        self.llm_engine = type("Engine", (), {"ready": ready_state(FakeEngineClient()).ready})

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def generate(self, prompts: Any, params: SamplingParams, *, use_tqdm: bool, lora_request: Any) -> Any:
        ids = prompts[0]["prompt_token_ids"]
        assert (lora_request is not None) is self.has_adapters
        assert params.seed is not None or not params.temperature or params.n == 2
        token_ids = [ids[index % len(ids)] for index in range(params.max_tokens or 0)]
        if self.last_token is not None:
            token_ids[-1] = self.last_token
        completion = type("Completion", (), {"token_ids": token_ids})
        return [type("Output", (), {"outputs": [completion] * params.n})]


def run(command: Any, *arguments: object) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args([str(one) for one in arguments])))


async def test_the_command_names_the_first_difference(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(verify_module, "LLM", EchoLLM)
    receipt = await receipt_of(key_file)
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps({"receipt": receipt}))
    assert run(VerifyCommand(), path) == 0
    assert capsys.readouterr().out == f"signed by {receipt['public_key']}\nall tokens are equal\n"
    monkeypatch.setattr(EchoLLM, "last_token", 1)
    assert run(VerifyCommand(), path) == 1
    assert "prompt 1, completion 1: token 4 is 111 in the receipt, and 1 here\n" in capsys.readouterr().out
    assert run(VerifyCommand(), path, "--public-key", "AAAA") == 1
    assert "another key has signed it" in capsys.readouterr().err
    path.write_text(json.dumps(receipt | {"numeric_contract": "another"}))
    assert run(VerifyCommand(), path) == 1
    assert "the signature does not fit" in capsys.readouterr().err
    signed = open_signer(str(key_file)).signed(receipt | {"numeric_contract": "another", "backends": {"weights": "w"}})
    path.write_text(json.dumps(signed))
    assert run(VerifyCommand(), path) == 1
    assert "the computation differs: weights is w in the receipt, and none here\n" in capsys.readouterr().out
    path.write_text(json.dumps(open_signer(str(key_file)).signed(receipt | {"weights": "other"})))
    assert run(VerifyCommand(), path) == 1  # under the right contract
    assert "the computation differs: weights is other in the receipt, and None here\n" in capsys.readouterr().out


async def test_the_command_names_both_contract_ids_where_nothing_else_differs(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(verify_module, "LLM", EchoLLM)
    receipt, path = await receipt_of(key_file), tmp_path / "receipt.json"
    path.write_text(json.dumps(open_signer(str(key_file)).signed(receipt | {"numeric_contract": "another"})))
    for last_token, of_tokens in ((None, "all tokens are equal nevertheless"), (1, "prompt 0, completion 0: token 4")):
        monkeypatch.setattr(EchoLLM, "last_token", last_token)
        assert run(VerifyCommand(), path) == 1
        _, of_contract, *others = capsys.readouterr().out.splitlines()
        assert "the numeric contract id is another in the receipt, and none here. " in of_contract
        assert others[0].startswith(of_tokens)


async def test_an_answer_with_an_adapter_names_its_content_and_is_computed_with_it(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(verify_module, "LLM", EchoLLM)
    engine, path = FakeEngineClient(), tmp_path / "receipt.json"
    adapter, other = write_adapter(tmp_path / "style"), write_adapter(tmp_path / "other")
    (other / "adapter_model.safetensors").write_bytes(b"x")
    await engine.load_adapter("style", str(adapter))
    answers = AnswerConfig(receipt_key_file=str(key_file))
    app = build_app(ready_state(engine, HTTPConfig(answers=answers)))
    receipt = (await call(app, "POST", "/v1/completions", COMPLETION | {"model": "style"})).json()["receipt"]
    check_signature(receipt)
    assert (receipt["adapter"], receipt["settings"]["max_lora_rank"]) == ("style", 16)

    def verified(*arguments: object, **changes: Any) -> tuple[int, list[str]]:
        path.write_text(json.dumps(open_signer(str(key_file)).signed(receipt | changes)))
        code = run(VerifyCommand(), path, *arguments)
        printed = capsys.readouterr()
        return code, [*printed.out.splitlines()[1:], *printed.err.splitlines()]

    assert verified("--adapter", adapter) == (0, ["all tokens are equal"])
    theirs, ours = receipt["adapter_digest"], adapter_digest(other, 1 << 20)
    difference = f"the computation differs: the adapter's digest is {theirs} in the receipt, and {ours} here"
    assert verified("--adapter", other) == (1, [difference, "all tokens are equal nevertheless"])
    monkeypatch.setattr(EchoLLM, "last_token", 1)
    assert verified("--adapter", other)[1][1].startswith("prompt 0, completion 0: token 4 is ")
    for arguments, changes, reason in (
        ((), {}, "the adapter 'style' was used: give its folder by --adapter"),
        (
            ("--adapter", adapter),
            {"adapter": None, "settings": {}},
            "no adapter was used, so --adapter must not be given",
        ),
        (("--adapter", adapter), {"adapter": None}, "it has settings that this command does not know"),
        (("--adapter", tmp_path / "gone"), {}, "gone is no folder of an adapter."),
    ):
        assert verified(*arguments, **changes) == (1, [f"llmstack verify: error: {reason}"])
    del receipt["adapter_digest"]
    code, (error,) = verified("--adapter", adapter)
    assert (code, "it has no digest of its adapter" in error) == (1, True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"completions": [], "version": 2}', '{"completions": [], "version": 1}', '{"receipts": [{}]}'],
)
def test_what_is_no_receipt_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "receipt.json"
    path.write_text(text)
    assert run(VerifyCommand(), path) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("it has a list of receipts" in error) == ("receipts" in text)


def test_texts_of_a_receipt_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps({"receipt": {"missing": "No.\x1b[2J\nall tokens are equal"}}))
    assert run(VerifyCommand(), path) == 1
    assert capsys.readouterr().err.endswith("the answer has no receipt. No. [2J all tokens are equal\n")


def test_a_new_key_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "new.pem"
    assert run(ReceiptKeyCommand(), path) == 0
    assert capsys.readouterr().out.strip() == open_signer(str(path)).public_key
    before = path.read_bytes()
    assert run(ReceiptKeyCommand(), path) == 1
    assert path.read_bytes() == before
