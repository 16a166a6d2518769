"""Receipts name the weights that have computed an answer, whatever the server has loaded since."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_helpers.reloading import Seen, serving
from server_helpers.waiting import wait_until

from llmstack_llm import RequestOutput
from llmstack_llm.testing import write_model_folder
from llmstack_server.commands import VerifyCommand
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.receipts import MIXED_WEIGHTS, check_signature, make_key, open_signer
from llmstack_types import SamplingParams

from .test_receipts import run

pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")

BODY = {"prompt": "Hello", "max_tokens": 100, "stream": True}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    make_key(tmp_path / "key.pem")
    return str(tmp_path / "key.pem")


def weights_folder(folder: Path, name: str, **changes: Any) -> Path:
    """A model whose weights are this name, for the runner that echoes."""
    (folder / f"{name}.weights").write_text(name)
    return write_model_folder(folder / f"{name}?step_delay_s=0.01&weights_file={folder / name}.weights", **changes)


def receipt_of(events: list[Any]) -> dict[str, Any]:
    (receipt,) = [event["receipt"] for event in events if "receipt" in event]
    check_signature(receipt)
    return dict(receipt)


async def stopped_stream(app: Any, llm: Any, body: dict[str, Any] = BODY) -> asyncio.Task[Any]:
    """A stream that has begun, in an engine core that stands still."""
    llm.add_observer(seen := Seen())
    running = asyncio.create_task(call(app, "POST", "/v1/completions", body))
    await wait_until(lambda: seen.request_ids)
    os.kill(llm.engines[0].pid, signal.SIGSTOP)
    return running


async def test_each_answer_has_the_receipt_of_the_weights_that_it_began_with(key_file: str, tmp_path: Path):
    first, other = (weights_folder(tmp_path, name) for name in ("first", "other"))
    entry = {"name": "next", "model": str(other), "max_model_len": 120, "quantization": "int8"}
    async with serving(first, json.dumps(entry), receipts=open_signer(key_file)) as (app, llm):
        before, pid = llm.engines[0], llm.engines[0].pid
        running = await stopped_stream(app, llm)
        assert (await call(app, "POST", "/v1/reload", {"name": "next"})).json()["num_finishing_requests"] == 1
        new = (await call(app, "POST", "/v1/completions", BODY | {"stream": False})).json()["receipt"]
        after = llm.engines[0]
        os.kill(pid, signal.SIGCONT)
        old = receipt_of((await running).events())
    check_signature(new)
    found = [(one["weights_name"], one["weights"], one["numeric_contract"]) for one in (old, new)]
    assert found == [
        (name, ready.backends["weights"], ready.numeric_contract_id)
        for name, ready in (("start", before), ("next", after))
    ]
    assert before.numeric_contract_id != after.numeric_contract_id
    assert new["settings"] == old["settings"] | {"max_model_len": 120, "quantization": "int8"}
    assert "moved_to" not in old | new


async def test_what_moves_says_so_and_what_waits_has_the_weights_of_its_tokens(
    key_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, other = (weights_folder(tmp_path, name) for name in ("first", "other"))
    entries = (json.dumps({"name": "larger", "num_kv_blocks": 64}), f"next={other}")
    async with serving(first, *entries, receipts=open_signer(key_file)) as (app, llm):
        running = await stopped_stream(app, llm)
        moved = await call(app, "POST", "/v1/reload", {"name": "larger", "running": "move"})
        assert moved.json()["num_moved_requests"] == 1
        receipt = receipt_of((await running).events())
        assert (receipt["weights_name"], receipt["completions"][0]["num_tokens"]) == ("start", 100)
        (went_on,) = receipt["moved_to"]
        assert went_on["weights_name"] == "larger"
        for name in ("weights", "numeric_contract", "settings"):
            assert went_on[name] == receipt[name]

        # One that waits for the next engine core was admitted by the one before.
        await wait_until(lambda: not llm._client.is_reloading)
        monkeypatch.setattr("llmstack_llm.reloading.find_memory_problem", lambda config: "no room")
        running = await stopped_stream(app, llm)
        reload = asyncio.create_task(call(app, "POST", "/v1/reload", {"name": "next"}))
        await wait_until(lambda: llm.is_exchanging)
        held = asyncio.create_task(call(app, "POST", "/v1/completions", BODY))
        await wait_until(lambda: llm.num_requests_in_flight == 2)
        os.kill(llm.engines[0].pid, signal.SIGCONT)
        weights = (await reload).json()["weights"]
        receipts = [receipt_of((await one).events()) for one in (running, held)]
    assert [one["weights_name"] for one in receipts] == ["larger", "next"]
    assert receipts[1]["weights"] == weights["digest"] != receipts[0]["weights"]
    assert receipts[1]["numeric_contract"] == weights["numeric_contract_id"]


def receipt_of_prompts(key_file: str, state: ServerState, *computed: tuple[str, ...]) -> dict[str, Any]:
    """The receipt of an answer to prompts, by the weights that have computed each."""
    assert state.ready is not None
    signer = open_signer(key_file)
    outputs: Any = SimpleNamespace(prompts=[SimpleNamespace(adapter=None, sampling_params=SamplingParams())])
    noted, sign = signer.note(state, outputs)
    for index, names in enumerate(computed):
        engines = tuple(
            dataclasses.replace(state.ready, weights_name=name, backends={"weights": name[0]}) for name in names
        )
        noted.engines[index] = RequestOutput("id", None, [], prompt_index=index, engines=engines).engines
    return sign("a", "m", 1)


@pytest.mark.parametrize(
    ("computed", "names"),
    [
        ((("start",), ("start",)), ["start"]),
        ((("start",), ("start", "smaller")), ["start", "smaller"]),
        ((("start", "smaller", "start"),), ["start", "smaller"]),
        (((),), ["start"]),  # it has no token
    ],
)
def test_a_receipt_has_each_engine_core_once(key_file: str, computed: Any, names: list[str]):
    state = ready_state(FakeEngineClient())
    state.config = dataclasses.replace(state.config, reload=ReloadOptions(reload_models=("smaller=/m",)))
    receipt = receipt_of_prompts(key_file, state, *computed)
    assert [one["weights_name"] for one in (receipt, *receipt.get("moved_to", ()))] == names
    check_signature(receipt)


def test_prompts_that_different_weights_have_computed_have_a_reason_instead(
    key_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    answer = receipt_of_prompts(key_file, ready_state(FakeEngineClient()), ("start",), ("next",))
    assert answer == {"version": 1, "answer": "a", "missing": MIXED_WEIGHTS}
    path = tmp_path / "answer.json"
    path.write_text(json.dumps({"receipt": answer}))
    assert run(VerifyCommand(), path) == 1
    assert capsys.readouterr().err == (
        f"llmstack verify: error: {path}: the answer has no receipt. A reload came between the prompts of this "
        "request, so different weights have computed them.\n"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda one: one, "after a reload it went on in another engine core: smaller\n"),
        (lambda one: one | {"numeric_contract": "x"}, "it went on with other weights or another numeric contract\n"),
        (lambda one: {}, "it is malformed: KeyError\n"),
    ],
)
def test_the_command_tells_of_a_move_and_checks_it(
    key_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], dict[str, Any]], text: str,
):  # fmt: skip
    from llmstack_server.commands import verify as verify_module

    from .test_receipts import EchoLLM

    class SameWeights(EchoLLM):
        def __init__(self, model: str, **settings: Any) -> None:
            super().__init__(model, **settings)
            backends = {"weights": "s"}
            self.llm_engine.ready = dataclasses.replace(self.llm_engine.ready, backends=backends)

    monkeypatch.setattr(verify_module, "LLM", SameWeights)
    state = ready_state(FakeEngineClient())
    state.config = dataclasses.replace(state.config, reload=ReloadOptions(reload_models=("smaller=/m",)))
    receipt = receipt_of_prompts(key_file, state, ("start", "smaller"))
    del receipt["signature"]
    signed = open_signer(key_file).signed(receipt | {"moved_to": [change(one) for one in receipt["moved_to"]]})
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(signed))
    is_right = change is not None and text.startswith("after")
    assert run(VerifyCommand(), path) == (0 if is_right else 1)
    printed = capsys.readouterr()
    assert text in printed.out + printed.err
    assert ("all tokens are equal\n" in printed.out) is is_right
