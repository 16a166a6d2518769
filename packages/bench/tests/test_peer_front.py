"""The HTTP front of engines that have none, read by the load generator."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmstack_bench.result import RequestResult
from llmstack_bench.stream import EventLines, StreamRecorder

FRONT = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "peers" / "front.py"))


class ThreeTokens:
    """An engine that answers every request with the prompt's first token, three times in two parts."""

    def start(self) -> None:
        pass

    def add(self, token_ids: list[int], max_tokens: int, *, ignore_eos: bool) -> asyncio.Queue[list[int] | None]:
        assert (max_tokens, ignore_eos) == (3, True)
        tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
        for part in ([token_ids[0]], token_ids[:1] * 2, None):
            tokens.put_nowait(part)
        return tokens


async def answer(folder: Path, path: str, body: bytes) -> bytes:
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    front, sent = FRONT["Front"]("m", folder / "tokenizer.json", ThreeTokens()), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await front({"type": "http", "path": path}, receive, send)
    assert [message.get("more_body") for message in sent].count(False) == 1
    return b"".join(message.get("body", b"") for message in sent)


async def test_a_stream_holds_the_text_and_the_number_of_its_tokens(tmp_path: Path):
    body = json.dumps({"prompt": [1, 0], "max_tokens": 3, "ignore_eos": True}).encode()
    stream = await answer(tmp_path, "/v1/completions", body)
    result = RequestResult()
    recorder = StreamRecorder(result, 0.0)
    payloads = list(EventLines().feed(stream))
    for payload in payloads:
        recorder.take(payload, 1.0)
    recorder.close()
    assert (result.num_prompt_tokens, result.num_output_tokens, result.num_chunks) == (2, 3, 2)
    assert [json.loads(payload)["choices"][0]["text"] for payload in payloads[:3]] == ["b", "b b", ""]


async def test_the_model_is_listed(tmp_path: Path):
    assert json.loads(await answer(tmp_path, "/v1/models", b""))["data"][0]["id"] == "m"
