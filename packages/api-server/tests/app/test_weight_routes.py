"""Routes of trainers: how an update is said, and what the server does meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

PROMPT = {"prompt": "Hello", "max_tokens": 5}
PAGE = Path(__file__).resolve().parents[4] / "docs" / "training.md"


class Trainer:
    """A client of a server, with folders of weights named `a`, `b` and `c`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in "abc":
            (root / name).mkdir(parents=True)
        self.engine = FakeEngineClient()
        http = HTTPConfig(enable_control_routes=True)
        self.state = ready_state(self.engine, http)
        self.state.config = dataclasses.replace(self.state.config, reload=ReloadOptions(weight_update_dir=str(root)))
        self.app = build_app(self.state)

    async def post(self, path: str, **body: Any) -> Answer:
        return await call(self.app, "POST", path, body)

    async def update(self, name: str) -> Answer:
        return await self.post("/update_weights", update_info={"path": name})

    @property
    def taken(self) -> list[str]:
        """The folders that the engine core has received, in their order."""
        return [Path(one[1]).name for one in self.engine.operations if one[0] == "update_weights"]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


async def test_weights_are_taken_at_once_without_a_start(trainer: Trainer) -> None:
    before = trainer.state.system_fingerprint
    answer = (await trainer.update("a")).json()
    assert (answer["message"], answer["weights"]["name"]) == ("Weights updated", "a")
    assert (answer["weights"]["digest"], answer["weights"]["numeric_contract_id"]) == ("digest", "contract")
    assert answer["weights"]["system_fingerprint"] == trainer.state.system_fingerprint != before
    assert (await call(trainer.app, "GET", "/v1/models")).json()["data"][0]["weights"]["name"] == "a"
    assert (await trainer.post("/v1/completions", **PROMPT)).status == 200
    assert trainer.taken == ["a"]


async def test_a_started_update_counts_from_its_end_on(trainer: Trainer) -> None:
    assert (await trainer.post("/init_weight_transfer_engine", init_info={})).status == 200
    assert (await trainer.post("/finish_weight_update")).status == 409
    assert (await trainer.post("/start_weight_update", is_checkpoint_format=True)).status == 200
    assert (await trainer.update("a")).json() == {"message": "Weights taken"}
    again = await trainer.update("b")
    assert (again.status, again.json()["error"]["code"]) == (409, "reload_failed")
    assert trainer.taken == []
    assert (await trainer.post("/finish_weight_update")).json()["weights"]["name"] == "a"
    assert trainer.taken == ["a"]
    assert (await trainer.post("/start_weight_update")).status == 200
    empty = await trainer.post("/finish_weight_update")
    assert (empty.status, empty.json()["error"]["param"]) == (400, "update_info.path")


async def test_sglangs_form_names_the_version(trainer: Trainer) -> None:
    path = str(trainer.root / "b")
    answer = await trainer.post("/update_weights_from_disk", model_path=path, weight_version="step 7")
    assert answer.json() == {"success": True, "message": "Weights updated", "num_paused_requests": 0}
    assert trainer.state.weights_object()["name"] == "step 7"


@pytest.mark.parametrize("is_paused", [False, True])
async def test_what_fails_changes_nothing_and_a_pause_stays_as_it_was(trainer: Trainer, is_paused: bool) -> None:
    trainer.state.is_paused = is_paused
    before = trainer.state.weights_object()
    trainer.engine.weights_problem = "a tensor is missing"
    answer = await trainer.update("a")
    assert (answer.status, answer.json()["error"]["message"]) == (409, "Nothing has changed: a tensor is missing")
    assert (trainer.state.weights_object(), trainer.state.is_paused) == (before, is_paused)
    trainer.engine.weights_problem = ""
    assert (await trainer.update("a")).status == 200
    assert trainer.state.is_paused is is_paused


async def updating(trainer: Trainer) -> tuple[asyncio.Task[Answer], asyncio.Task[Answer]]:
    """A request that runs, and an update that waits for its end."""
    trainer.engine.step_delay_s = 0.03
    running = asyncio.create_task(trainer.post("/v1/completions", **PROMPT))
    await wait_until(lambda: trainer.state.in_flight.count > 0)
    update = asyncio.create_task(trainer.update("a"))
    await wait_until(lambda: trainer.state.is_updating_weights)
    return running, update


async def test_a_resume_meanwhile_lets_no_request_in(trainer: Trainer) -> None:
    running, update = await updating(trainer)
    assert (await trainer.post("/resume")).status == 200
    refused = await trainer.post("/v1/completions", **PROMPT)
    assert (refused.status, refused.json()["error"]["message"]) == (503, "The weights are being changed.")
    assert trainer.taken == []
    assert ((await running).status, (await update).status, trainer.taken) == (200, 200, ["a"])
    assert (await trainer.post("/v1/completions", **PROMPT)).status == 200


async def test_a_pause_meanwhile_outlives_the_update(trainer: Trainer) -> None:
    running, update = await updating(trainer)
    assert (await trainer.post("/pause?mode=wait")).status == 200
    assert ((await running).status, (await update).status) == (200, 200)
    assert (await call(trainer.app, "GET", "/is_paused")).json() == {"is_paused": True}
    assert (await trainer.post("/v1/completions", **PROMPT)).status == 503
    await trainer.post("/resume")
    assert (await trainer.post("/v1/completions", **PROMPT)).status == 200


class SlowChange:
    """A change of weights that the engine core has begun, and that goes on once `may_end` is set."""

    def __init__(self, trainer: Trainer) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._control = trainer.engine.control
        trainer.engine.control = self._wait  # type: ignore[method-assign]

    async def _wait(self, operation: Any, *arguments: Any) -> Any:
        self.has_begun.set()
        await self.may_end.wait()
        return await self._control(operation, *arguments)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", PROMPT), ("/v1/embeddings", {"input": "a"})], ids=["completion", "pooling"]
)
async def test_a_request_whose_body_comes_over_an_update_or_a_pause_is_refused(
    trainer: Trainer, path: str, body: dict[str, Any]
) -> None:
    change, late = SlowChange(trainer), asyncio.Event()
    waiting = asyncio.create_task(call(trainer.app, "POST", path, body, body_comes=late))
    await asyncio.sleep(0)
    update = asyncio.create_task(trainer.update("a"))
    await change.has_begun.wait()
    late.set()
    refused = await waiting
    assert (refused.status, refused.json()["error"]["message"]) == (503, "The weights are being changed.")
    change.may_end.set()
    assert (await update).status == 200
    late.clear()
    waiting = asyncio.create_task(call(trainer.app, "POST", path, body, body_comes=late))
    await asyncio.sleep(0)
    assert (await trainer.post("/pause")).status == 200
    late.set()
    assert ((await waiting).status, trainer.engine.admitted) == (503, [])


async def test_a_request_that_needs_no_model_passes_a_pause_with_a_late_body(trainer: Trainer) -> None:
    late = asyncio.Event()
    waiting = asyncio.create_task(
        call(trainer.app, "POST", "/v1/responses/input_tokens", {"input": "a"}, body_comes=late)
    )
    await asyncio.sleep(0)
    assert (await trainer.post("/pause")).status == 200
    late.set()
    assert (await waiting).status == 200


async def test_a_drain_waits_for_a_change(trainer: Trainer) -> None:
    change = SlowChange(trainer)
    update = asyncio.create_task(trainer.update("a"))
    await change.has_begun.wait()
    assert not await trainer.state.in_flight.wait_until_idle(0.01)
    change.may_end.set()
    assert await trainer.state.in_flight.wait_until_idle(5)
    assert ((await update).status, trainer.taken) == (200, ["a"])


async def test_a_server_that_ends_begins_no_change(trainer: Trainer) -> None:
    running, update = await updating(trainer)
    trainer.state.lifecycle.advance(LifecycleState.DRAINING)
    assert ((await running).status, (await update).status, trainer.taken) == (200, 503, [])


async def test_an_update_goes_on_without_its_client(trainer: Trainer) -> None:
    running, update = await updating(trainer)
    update.cancel()
    assert (await running).status == 200
    await wait_until(lambda: trainer.taken == ["a"] and not trainer.state.is_updating_weights)
    assert trainer.state.weights_object()["name"] == "a"


async def test_the_folder_of_a_started_update_is_checked_again_at_its_end(trainer: Trainer, tmp_path: Path) -> None:
    await trainer.post("/start_weight_update")
    await trainer.update("b")
    assert (await trainer.post("/update_weights_from_disk", model_path="b")).status == 200
    in_use = await trainer.post("/finish_weight_update")
    assert (in_use.status, "are in use" in in_use.json()["error"]["message"]) == (400, True)
    await trainer.post("/start_weight_update")
    await trainer.update("c")
    (trainer.root / "c").rmdir()
    (trainer.root / "c").symlink_to(tmp_path)
    assert (await trainer.post("/finish_weight_update")).status == 400
    assert trainer.taken == ["b"]


async def test_no_name_of_weights_is_that_of_the_start(trainer: Trainer) -> None:
    (trainer.root / "start").mkdir()
    before = trainer.state.system_fingerprint
    for fields in ({"model_path": "start"}, {"model_path": "a", "weight_version": "start"}):
        assert (await trainer.post("/update_weights_from_disk", **fields)).status == 400
    assert (await trainer.post("/update_weights_from_disk", model_path="a", weight_version="1")).status == 200
    assert trainer.state.system_fingerprint != before


@pytest.mark.parametrize("aborts", [False, True])
async def test_running_requests_end_before_the_weights_change(trainer: Trainer, aborts: bool) -> None:
    trainer.engine.step_delay_s = 0.03
    running = asyncio.create_task(trainer.post("/v1/completions", **PROMPT))
    await wait_until(lambda: trainer.state.in_flight.count > 0)
    if aborts:
        update = trainer.post("/update_weights_from_disk", model_path="a", abort_all_requests=True)
    else:
        update = trainer.update("a")
    updating = asyncio.create_task(update)
    await asyncio.sleep(0.02)
    assert trainer.taken == []
    assert (await trainer.post("/v1/completions", **PROMPT)).status == 503
    other = await trainer.update("b")
    assert (other.status, "another update is running" in other.json()["error"]["message"]) == (409, True)
    assert (await updating).status == 200
    assert (await running).status == 200
    assert trainer.taken == ["a"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {}}, "path"),
        ("/update_weights", {"update_info": {"path": 3}}, "update_info.path"),
        ("/update_weights", {"update_info": {"path": "../weights"}}, "update_info.path"),
        ("/update_weights", {"update_info": {"path": "d"}}, "update_info.path"),
        ("/update_weights", {"update_info": {"path": "a/" * 100_000}}, "update_info.path"),
        ("/update_weights_from_disk", {"model_path": "/tmp"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a" * 4097}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a", "weight_version": ""}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "a", "weight_version": "a\nb"}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "a", "weight_version": "a" * 65}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "a", "load_format": "auto"}, "load_format"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}}, "init_info.master_address"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/finish_weight_update", {"a": 1}, "a"),
    ],
)
async def test_other_bodies_are_refused_by_name(trainer: Trainer, path: str, body: dict[str, Any], param: str) -> None:
    answer = await trainer.post(path, **body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert trainer.taken == []


async def test_the_requests_of_the_page_are_answered(trainer: Trainer, tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    *of_vllm, of_sglang = re.findall(r"^\| `POST (/\S+)` \| `(\{.*?\})` \|", page, re.MULTILINE)
    assert len(of_vllm) == 4
    (trainer.root / "step-17").mkdir()
    for path, body in of_vllm:
        assert (await trainer.post(path, **json.loads(body))).status == 200
    assert trainer.taken == ["step-17"]
    (curl,) = re.findall(r":8000(/\S+) -H .* -d '(.*)'", page)
    for path, body in (of_sglang, curl):
        another = Trainer(tmp_path / path[1:])
        (another.root / "step-17").mkdir()
        assert (await another.post(path, **json.loads(body))).status == 200
        assert another.taken == ["step-17"]


async def test_a_link_that_leads_elsewhere_is_no_folder_of_weights(trainer: Trainer, tmp_path: Path) -> None:
    (trainer.root / "link").symlink_to(tmp_path)
    assert (await trainer.update("link")).status == 400
    assert (await trainer.update("a")).status == 200
    in_use = await trainer.update(str(trainer.root / "a"))
    assert "the weights of this folder are in use" in in_use.json()["error"]["message"]


async def test_without_the_folder_there_are_no_such_routes() -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True)))
    answer = await call(app, "POST", "/update_weights", {})
    assert (answer.status, "--weight-update-dir" in answer.json()["error"]["message"]) == (404, True)
