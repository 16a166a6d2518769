"""A second run of a request has the outputs of its first one, however the engine has cut them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import CompletionOutput, GivenSampling, Logprob, RequestOutput
from llmstack_llm.outputs.collector import merged
from llmstack_llm.requests import GenerationRequest
from llmstack_server.state.answer_source import AnswerSource, OtherTextError
from llmstack_server.state.repeated_outputs import RepeatedOutputs, submit_kept
from llmstack_server.testing import FakeEngineClient
from llmstack_server.testing.engine_client import FakeStream

Texts = Sequence[str]
TEXTS = st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=3)


def single(texts: Texts, order: Sequence[int]) -> Iterator[RequestOutput]:
    """The outputs of completions with these texts, a token each; `order` says which completion is next."""
    positions = [0] * len(texts)
    for number in order:
        index = number % len(texts)
        while positions[index] == len(texts[index]):
            index = (index + 1) % len(texts)
        positions[index] += 1
        yield one_token(texts, index, positions[index] - 1, is_finished=positions == [len(text) for text in texts])


def one_token(texts: Texts, index: int, position: int, *, is_finished: bool) -> RequestOutput:
    text, char = texts[index], texts[index][position]
    reason = "stop" if position == len(text) - 1 else None
    logprobs = [{ord(char): Logprob(-float(position))}]
    return RequestOutput(
        "r", None, [1], [None] if position == index == 0 else None,
        [CompletionOutput(index, char, [ord(char)], None, logprobs, reason)], is_finished,
    )  # fmt: skip


def cut(outputs: Iterator[RequestOutput], sizes: Sequence[int]) -> list[RequestOutput]:
    """So many neighbours merged into one, as where the reader is late."""
    found: list[RequestOutput] = []
    rest = list(outputs)
    for size in [*sizes, *[1] * len(rest)]:
        some, rest = rest[:size], rest[size:]
        for number, output in enumerate(some):
            found.append(merged(found.pop(), output) if number else output)
    return found


async def indexed(outputs: Sequence[RequestOutput]) -> AsyncIterator[tuple[int, RequestOutput]]:
    for output in outputs:
        yield 0, dataclasses.replace(output)


def stream(outputs: Sequence[RequestOutput]) -> FakeStream:
    return FakeStream((), indexed(outputs))


async def read(source: AnswerSource, outputs: Sequence[RequestOutput], *, count: int | None = None) -> list[Any]:
    """What a reader sees of outputs: of the first `count`, or of all."""
    found = []
    async with RepeatedOutputs(stream(outputs), source) as repeated:
        async for output in repeated:
            pieces = [(one.index, one.text, one.logprobs, one.finish_reason) for one in output.outputs]
            found.append((pieces, output.prompt_logprobs))
            if len(found) == count:
                break
    return found


def whole(found: list[Any], num_texts: int) -> list[str]:
    pieces = [piece for output, _ in found for piece in output]
    return ["".join(text for index, text, *_ in pieces if index == number) for number in range(num_texts)]


@given(TEXTS, st.lists(st.integers(0, 9), min_size=36, max_size=36), st.lists(st.integers(1, 4), max_size=9), st.data())
async def test_later_runs_repeat_what_an_earlier_one_had(texts: Texts, order: list[int], sizes: list[int], data: Any):
    num_tokens = sum(map(len, texts))
    outputs = cut(single(texts, order[:num_tokens]), sizes)
    first = AnswerSource()
    seen = await read(first, outputs, count=data.draw(st.integers(1, len(outputs))))
    kept = first.cuts_after(0)
    other_order = data.draw(st.permutations(order[:num_tokens]))
    for _ in range(2):  # also where the second run has ended early
        again = AnswerSource(cuts=kept)
        run = await read(
            again, list(single(texts, other_order)), count=data.draw(st.integers(len(seen), len(seen) + 3))
        )
        assert run[: len(seen)] == seen
        kept = again.cuts_after(0)
        seen = run[: len(seen)]
    last = await read(AnswerSource(cuts=kept), list(single(texts, other_order)))
    assert last[: len(seen)] == seen
    assert whole(last, len(texts)) == list(texts)


@pytest.mark.parametrize("other", ["ab", "abx", "abcdef", "xbc"])
async def test_another_text_is_refused(other: str):
    source = AnswerSource()
    await read(source, list(single(["abc"], [0, 0, 0])))
    again = AnswerSource(cuts=source.cuts_after(0))
    with pytest.raises(OtherTextError):
        await read(again, list(single([other], [0] * len(other))))
    assert again.is_other


@pytest.mark.parametrize("num_bytes", range(0, 40, 4))
async def test_cuts_that_are_torn_are_another_text(num_bytes: int):
    source = AnswerSource()
    await read(source, list(single(["abc"], [0, 0, 0])))
    torn = AnswerSource(cuts=source.cuts_after(0)[:num_bytes])
    if num_bytes % 24 == 0:  # a whole output has six numbers
        assert whole(await read(torn, list(single(["abc"], [0, 0, 0]))), 1) == ["abc"]
    else:
        with pytest.raises(OtherTextError):
            await read(torn, list(single(["abc"], [0, 0, 0])))


def test_what_a_run_draws_is_that_of_the_first_one():
    source = AnswerSource()
    assert [source.lasting(value) for value in ("a", 1, "b")] == ["a", 1, "b"]
    again = AnswerSource(source.values)
    assert [again.lasting(value) for value in ("c", 2)] == ["a", 1]
    again.begin_again()
    assert [again.lasting(value) for value in ("d", 3, "e", "f")] == ["a", 1, "b", "f"]
    with pytest.raises(OtherTextError):
        AnswerSource(source.values).lasting(1)


async def test_what_is_taken_is_noted_and_nothing_is_taken_before_all_is_repeated():
    source, taken = AnswerSource(), []
    await read(source, cut(single(["abcdef"], [0] * 6), [2]), count=2)
    for num_taken in (2, 0):  # the second run has all that the first one took
        source.begin_again()
        repeated, texts = RepeatedOutputs(stream(list(single(["abcdef"], [0] * 6))), source), []
        repeated.follow(lambda output: taken.append(output.outputs[0].text) is None)
        async for output in repeated:
            texts += [one.text for one in output.outputs]
        assert (texts, taken) == ((["ab", "c", "f"], ["d", "e"]) if num_taken else (["ab", "c", "d", "e", "f"], []))
        taken.clear()


@pytest.mark.parametrize("is_second", [False, True])
async def test_outputs_of_a_second_run_have_a_token_each(is_second: bool):
    asked: list[bool] = []

    class Engine(FakeEngineClient):
        async def submit(self, *requests: GenerationRequest) -> FakeStream:
            asked.extend(request.is_split for request in requests)
            return await super().submit(*requests)

    source = AnswerSource(cuts=bytes(4 * 4) if is_second else b"")
    request = GenerationRequest("r", "abc", GivenSampling({"max_tokens": 2}))
    await (await submit_kept(Engine(), source, request)).aclose()
    assert asked == [is_second]


@pytest.mark.parametrize("is_followed", [False, True])
async def test_the_engine_cores_and_tokens_of_every_run_are_noted(is_followed: bool):
    source, ready = AnswerSource(), FakeEngineClient().ready
    for _ in range(2):
        outputs = [dataclasses.replace(one, engines=(ready,)) for one in single(["abc"], [0] * 3)]
        source.begin_again()
        noted = RepeatedOutputs(stream(outputs), source)
        if is_followed:
            noted.follow(lambda output: True)
        async for _ in noted:
            pass
        assert noted.engines == {0: (ready,)}
        assert source.token_ids() == {(0, 0): [97, 98, 99]}


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_what_the_disk_lacks_follows_from_it_where_it_is_one_token_an_output(is_repeatable: bool):
    source = AnswerSource()
    source.is_repeatable = is_repeatable

    def take(*token_ids: int) -> bool:
        output = RequestOutput("r", None, [1], outputs=[CompletionOutput(0, "x", list(token_ids))])
        source.note(output)
        return source.follows

    assert not take(1)  # before the request is there
    source.note_written(0, source.num_bytes)
    assert (take(2), take(3)) == (is_repeatable, is_repeatable)
    assert not take(4, 5)
    num_bytes = source.num_bytes
    assert not take(6)
    source.note_written(0, num_bytes - 4)
    assert not source.follows
    source.note_written(0, num_bytes)
    assert source.follows is is_repeatable
    source.lasting("drawn")
    assert not source.follows
    source.note_written(1, num_bytes)
    assert source.follows is is_repeatable


@pytest.mark.parametrize("num_completions", [1, 2])
async def test_several_completions_do_not_follow_from_what_was_written_before_them(num_completions: int):
    source, engine = AnswerSource(["id"]), FakeEngineClient()
    source.is_repeatable = True
    source.note_written(1, 0)  # while the request is on its way to the engine
    request = GenerationRequest("r", "abc", GivenSampling({"max_tokens": 2, "n": num_completions}))
    async with await submit_kept(engine, source, request):
        assert source.follows is (num_completions == 1)
