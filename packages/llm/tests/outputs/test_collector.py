"""Outputs that are taken without a turn of their consumer."""

from __future__ import annotations

import asyncio

import pytest

from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import CompletionOutput, RequestOutput
from llmstack_types import RequestOutputKind


def output(text: str, *, request_id: str = "r", finished: bool = False) -> RequestOutput:
    return RequestOutput(request_id, None, [1], outputs=[CompletionOutput(0, text, [ord(text)])], finished=finished)


def text_of(*outputs: RequestOutput) -> str:
    return "".join(completion.text for one in outputs for completion in one.outputs)


async def waiting_consumer(collector: RequestOutputCollector) -> asyncio.Task[RequestOutput]:
    consumer = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    return consumer


async def test_a_follower_takes_outputs_while_the_consumer_waits_and_the_consumer_the_last():
    collector, taken = RequestOutputCollector(RequestOutputKind.DELTA), list[RequestOutput]()
    collector.take = lambda one: taken.append(one) is None
    collector.put(output("a"))  # no consumer waits yet
    assert text_of(await collector.get()) == "a"
    consumer = await waiting_consumer(collector)
    for text in "bc":
        collector.put(output(text))
        await asyncio.sleep(0)
    assert text_of(*taken) == "bc"
    assert not consumer.done()
    collector.put(output("d", finished=True))
    assert text_of(await consumer) == "d"


async def test_outputs_that_come_in_one_turn_are_taken_as_one():
    collector, taken = RequestOutputCollector(RequestOutputKind.DELTA), list[RequestOutput]()
    collector.take = lambda one: taken.append(one) is None
    consumer = await waiting_consumer(collector)
    for text in "abc":
        collector.put(output(text))
    await asyncio.sleep(0)
    assert [text_of(one) for one in taken] == ["abc"]
    consumer.cancel()


async def test_what_a_follower_refuses_comes_to_the_consumer_in_order():
    collector, taken = RequestOutputCollector(RequestOutputKind.DELTA), list[RequestOutput]()
    has_room = False
    collector.take = lambda one: has_room and taken.append(one) is None
    consumer = await waiting_consumer(collector)
    collector.put(output("a"))
    await asyncio.sleep(0)
    has_room = True
    collector.put(output("b"))  # before the consumer has run
    assert text_of(await consumer) == "ab"
    collector.put(output("c"))  # while it is busy
    await asyncio.sleep(0)
    assert not taken
    assert text_of(await collector.get()) == "c"


async def test_an_error_of_a_follower_is_raised_by_the_consumer():
    collector = RequestOutputCollector(RequestOutputKind.DELTA)

    def fail(one: RequestOutput) -> bool:
        raise ValueError("cannot be encoded")

    collector.take = fail
    consumer = await waiting_consumer(collector)
    collector.put(output("a"))
    with pytest.raises(ValueError, match="cannot be encoded"):
        await consumer


async def test_followers_of_several_streams_take_theirs_in_order():
    taken = list[str]()
    collectors = [RequestOutputCollector(RequestOutputKind.DELTA) for _ in range(3)]
    consumers = []
    for index, collector in enumerate(collectors):
        collector.take = lambda one, index=index: taken.append(f"{index}{text_of(one)}") is None
        consumers.append(await waiting_consumer(collector))
    for collector in collectors:
        collector.put(output("a"))
    assert not taken
    await asyncio.sleep(0)
    assert taken == ["0a", "1a", "2a"]
    collectors[1].put_error(ValueError("gone"))
    collectors[1].put(output("b"))
    assert text_of(await consumers[1]) == "b"
    with pytest.raises(ValueError, match="gone"):
        await collectors[1].get()
    for consumer in consumers:
        consumer.cancel()
