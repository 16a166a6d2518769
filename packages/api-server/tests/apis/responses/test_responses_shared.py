"""Several processes answer for one server: each of them finds every response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from server_helpers.waiting import wait_until

from llmstack_server.apis.responses.input_items import new_response_id
from llmstack_server.apis.responses.shared import referenced_ids
from llmstack_server.app import build_app
from llmstack_server.state import remote_streams
from llmstack_server.state.peers import Peers
from llmstack_server.testing import FakeEngineClient, ready_state

FIELDS: dict[str, Any] = {"model": "fake", "max_output_tokens": 3}


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
async def clients(tmp_path: Path, engine: FakeEngineClient) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """A client of each of two processes."""
    async with AsyncExitStack() as stack:
        found = []
        for index in range(2):
            state = ready_state(engine)
            state.peers = await stack.enter_async_context(Peers(tmp_path, index, 2))
            http = httpx2.AsyncClient(transport=httpx2.ASGITransport(build_app(state)))
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
            found.append(await stack.enter_async_context(client))
        yield found


async def test_the_other_process_fetches_lists_and_deletes(clients: list[openai.AsyncOpenAI]):
    for here, there in (clients, clients[::-1]):
        response = await here.responses.create(**FIELDS, input="One")
        assert await there.responses.retrieve(response.id) == response
        assert [item.content[0].text async for item in there.responses.input_items.list(response.id)] == ["One"]
        await there.responses.delete(response.id)
        for client in (here, there):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)


async def test_a_conversation_goes_on_in_the_other_process(clients: list[openai.AsyncOpenAI], engine: FakeEngineClient):
    here, there = clients
    first = await here.responses.create(**FIELDS, input="One", instructions="Not again")
    second = await there.responses.create(**FIELDS, input="Two", previous_response_id=first.id)
    assert engine.admitted[-1].prompt == "One\nNot\nTwo"
    reference = {"type": "item_reference", "id": second.output[0].id}
    await here.responses.create(**FIELDS, input=[reference, {"role": "user", "content": "Three"}])
    assert engine.admitted[-1].prompt == "One\nThree"
    assert len((await here.responses.input_items.list(second.id)).data) == 3


async def test_a_response_of_the_background_is_polled_cancelled_and_followed_from_the_other_process(
    clients: list[openai.AsyncOpenAI], engine: FakeEngineClient
):
    here, there = clients
    engine.step_delay_s = 0.005
    long: dict[str, Any] = FIELDS | {"input": "Hello", "background": True, "max_output_tokens": 100}
    response = await here.responses.create(**long)
    await wait_until(lambda: engine.num_running)
    assert (await there.responses.retrieve(response.id)).status == "in_progress"
    assert (await there.responses.cancel(response.id)).status == "cancelled"
    assert engine.num_running == 0
    engine.step_delay_s = 0.0
    events = [event async for event in await here.responses.create(**long | {"stream": True})]
    again = [event async for event in await there.responses.retrieve(events[0].response.id, stream=True)]
    assert again == events


async def test_refusals_are_the_same_from_the_other_process(clients: list[openai.AsyncOpenAI]):
    here, there = clients
    response = await here.responses.create(**FIELDS, input="One")
    refusals = []
    for client in (here, there):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.cancel(response.id)
        refusals.append((caught.value.code, caught.value.param, caught.value.message))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(response.id, stream=True)
        refusals.append((caught.value.code, caught.value.param, caught.value.message))
    assert refusals[:2] == refusals[2:]


async def test_too_many_readers_in_other_processes_are_an_overload(
    clients: list[openai.AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
):
    here, there = clients
    fields: dict[str, Any] = FIELDS | {"input": "Hello", "background": True, "stream": True}
    events = [event async for event in await here.responses.create(**fields)]
    monkeypatch.setattr(remote_streams, "MAX_READERS", 0)
    with pytest.raises(openai.InternalServerError) as caught:
        _ = [event async for event in await there.responses.retrieve(events[0].response.id, stream=True)]
    assert (caught.value.status_code, caught.value.code) == (503, "server_is_overloaded")


UNKNOWN_IDS = [new_response_id(1), new_response_id(7), "resp_", "resp_x y", "é", "x" * 500]


@pytest.mark.parametrize("response_id", UNKNOWN_IDS, ids=range(len(UNKNOWN_IDS)))
async def test_what_is_nowhere_is_not_found(clients: list[openai.AsyncOpenAI], response_id: str):
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError) as caught:
        await clients[0].responses.create(**FIELDS, input="One", previous_response_id=response_id)
    assert caught.value.code == "not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await clients[0].responses.create(**FIELDS, input=[{"type": "item_reference", "id": response_id}])
    assert caught.value.code == "not_found"


def test_the_process_is_part_of_an_id_and_the_rest_is_random():
    assert new_response_id(0).startswith("resp_000")
    assert new_response_id(300).startswith("resp_12c")
    assert len({new_response_id(1) for _ in range(100)}) == 100


def test_references_are_found_in_any_input():
    items = [{"id": "x"}, {"type": "item_reference", "id": "y"}, {"id": 7}, {"id": "x"}, {"type": "message"}]
    assert referenced_ids(items) == ["x", "y"]
    assert referenced_ids("text") == referenced_ids(None) == []


def test_no_reference_is_looked_for_behind_an_entry_that_is_no_item():
    class Counted(list[Any]):
        num_read = 0

        def __iter__(self):
            for item in super().__iter__():
                self.num_read += 1
                yield item

    items = Counted([{"id": "x"}, *[7] * 1_000_000, {"id": "y"}])
    assert referenced_ids(items) == ["x"]
    assert items.num_read == 2
