"""A stream whose reader is cut off at random bytes, over and over, ends with the exact text."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.full  # hundreds of streams; test_resumable.py has a few cuts without a socket

NUM_CUTS = 1000
MAX_BYTES = 3000
PATH = "/v1/completions"
BODY: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
EVENT = re.compile(rb"id: ([0-9a-f]{32})\.([0-9]+)\ndata: ([^\n]*)\n\n")

# Reads streams as a page does, over connections that it gives up after random bytes. The results: texts, and cuts.
BROWSER = """
const [bodies, numCuts, maxBytes, done] = arguments;
let seed = 7;
const drawn = (limit) => { seed = (seed * 48271) % 2147483647; return seed % limit; };

async function readSome(number, body, lastId) {
  const abort = new AbortController(), limit = 1 + drawn(maxBytes), headers = {"Idempotency-Key": `page-${number}`};
  let answer;
  if (lastId && drawn(2)) {
    const [stream, after] = lastId.split(".");
    answer = await fetch(`/v1/streams/${stream}?after=${after}`, {signal: abort.signal});
  } else {
    headers["Content-Type"] = "application/json";
    if (lastId) headers["Last-Event-ID"] = lastId;
    answer = await fetch("/v1/completions", {method: "POST", headers, body, signal: abort.signal});
  }
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.getReader(), bytes = [];
  for (;;) {
    const {value, done} = await reader.read();
    if (value) bytes.push(...value);
    if (done || bytes.length >= limit) break;
  }
  abort.abort();
  return new TextDecoder().decode(new Uint8Array(bytes.slice(0, limit)));
}

async function readAll(number, body) {
  let lastId = "", text = "", count = 0, connections = 0;
  for (;;) {
    connections += 1;
    for (const [, stream, after, data] of (await readSome(number, body, lastId)).matchAll(
      /id: ([0-9a-f]{32})\\.([0-9]+)\\ndata: ([^\\n]*)\\n\\n/g)) {
      if (Number(after) !== ++count) throw new Error(`event ${after} in place of ${count}`);
      if (data === "[DONE]") return [text, connections - 1];
      lastId = `${stream}.${after}`;
      text += (JSON.parse(data).choices[0] || {text: ""}).text;
    }
  }
}

(async () => {
  const texts = bodies.map(() => []);
  let cuts = 0;
  for (let number = 0; cuts < numCuts; number += 1) {
    const [text, num] = await readAll(number, bodies[number % bodies.length]);
    texts[number % bodies.length].push(text);
    cuts += num;
  }
  return {texts, cuts};
})().then(done, (error) => done({error: String(error)}));
"""


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve("--api-server-count", "2") as running:
        yield running


def bodies_and_texts(server: Any) -> list[tuple[bytes, str]]:
    found = []
    for prompt in ("Once upon a time", "The old king", "A fox and a bird"):
        body = BODY | {"prompt": prompt}
        status, answer, _ = server.post(PATH, body)
        assert status == 200, answer
        found.append((json.dumps(body | {"stream": True}).encode(), str(answer["choices"][0]["text"])))
    return found


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    headers = {"Host": "x", "Connection": "close", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_some(port: int, message: bytes, limit: int) -> bytes:
    """The first bytes of an answer, whose connection is closed then; less where it ends before."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(message)
        while len(received) < limit and (some := connection.recv(limit - len(received))):
            received += some
    return bytes(received)


def body_of(answer: bytes) -> bytes:
    """The body as far as it has come, without the lengths of its chunks."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert rest == b"" or head.startswith(b"HTTP/1.1 200 "), answer
    body = b""
    while rest:
        length, mark, rest = rest.partition(b"\r\n")
        if not mark or int(length, 16) == 0:
            break
        body, rest = body + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    return body


def read_all(port: int, drawn: random.Random, number: int, body: bytes) -> tuple[str, int]:
    """The text of a stream that is read over connections which are lost after random bytes, and their number."""
    text, last_id, count, num_cuts = "", "", 0, 0
    while True:
        if last_id and drawn.random() < 0.5:
            stream_id, _, after = last_id.partition(".")
            message = request("GET", f"/v1/streams/{stream_id}?after={after}", {})
        else:
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"cut-{number}"}
            message = request("POST", PATH, headers | ({"Last-Event-ID": last_id} if last_id else {}), body)
        for stream_id, after, data in EVENT.findall(body_of(read_some(port, message, drawn.randrange(1, MAX_BYTES)))):
            count += 1
            assert int(after) == count
            if data == b"[DONE]":
                return text, num_cuts
            last_id = f"{stream_id.decode()}.{count}"
            text += "".join(choice["text"] for choice in json.loads(data)["choices"])
        num_cuts += 1


def test_a_thousand_cuts_of_sockets_change_no_text(server: Any) -> None:
    drawn, wanted, port = random.Random(0), bodies_and_texts(server), urlsplit(server.url).port
    assert port is not None
    num_cuts = number = 0
    while num_cuts < NUM_CUTS:
        body, text = wanted[number % len(wanted)]
        found, cuts = read_all(port, drawn, number, body)
        assert found == text
        num_cuts, number = num_cuts + cuts, number + 1


def test_a_thousand_cuts_of_a_page_change_no_text(server: Any) -> None:
    from browser_helpers import open_browser  # skips where there is none

    wanted = bodies_and_texts(server)
    with open_browser() as browser:
        browser.set_script_timeout(540)
        browser.get(f"{server.url}/live")
        bodies = [body.decode() for body, _ in wanted]
        found = browser.execute_async_script(BROWSER, bodies, NUM_CUTS, MAX_BYTES)
    assert "error" not in found, found["error"]
    assert found["cuts"] >= NUM_CUTS
    assert [set(texts) for texts in found["texts"]] == [{text} for _, text in wanted]
