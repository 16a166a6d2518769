"""A stream whose reader is cut off at random bytes, over and over, ends with the exact text."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cut_readers import LAST_EVENTS, MAX_BYTES, ROUTES, CutReader, Route

pytestmark = pytest.mark.full  # hundreds of streams; test_resumable.py has a few cuts without a socket

NUM_CUTS = 1000
NUM_READERS = 4
NUM_TEXTS = 3
NUM_FAULTS = 3
NUMBERS = itertools.count()  # of streams; their keys must not be those of another test

# Reads streams as a page does, over connections that it gives up after random bytes. The results: texts, and cuts.
BROWSER = """
const [requests, lastEvents, numCuts, maxBytes, done] = arguments;
let seed = 7;
const drawn = (limit) => { seed = (seed * 48271) % 2147483647; return seed % limit; };

async function readSome(number, {path, body}, lastId) {
  const abort = new AbortController(), limit = 1 + drawn(maxBytes), headers = {"Idempotency-Key": `page-${number}`};
  let answer;
  if (lastId && drawn(2)) {
    const [stream, after] = lastId.split(".");
    answer = await fetch(`/v1/streams/${stream}?after=${after}`, {signal: abort.signal});
  } else {
    headers["Content-Type"] = "application/json";
    if (lastId) headers["Last-Event-ID"] = lastId;
    answer = await fetch(path, {method: "POST", headers, body, signal: abort.signal});
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

// The text of an event of any route.
function deltaOf({choices, type, delta}) {
  if (choices) return choices.map((choice) => choice.text ?? choice.delta.content ?? "").join("");
  return (type === "content_block_delta" ? delta.text : type === "response.output_text.delta" ? delta : "") ?? "";
}

async function readAll(number, request) {
  let lastId = "", text = "", count = 0, connections = 0;
  for (;;) {
    connections += 1;
    for (const [, stream, after, data] of (await readSome(number, request, lastId)).matchAll(
      /id: ([0-9a-f]{32})\\.([0-9]+)\\n(?:event: [^\\n]*\\n)?data: ([^\\n]*)\\n\\n/g)) {
      if (Number(after) !== ++count) throw new Error(`event ${after} in place of ${count}`);
      if (lastEvents.some((start) => data.startsWith(start))) return [text, connections - 1];
      lastId = `${stream}.${after}`;
      text += deltaOf(JSON.parse(data));
    }
  }
}

(async () => {
  const texts = requests.map(() => []);
  let cuts = 0;
  for (let number = 0; cuts < numCuts; number += 1) {
    const [text, num] = await readAll(number, requests[number % requests.length]);
    texts[number % requests.length].push(text);
    cuts += num;
  }
  return {texts, cuts};
})().then(done, (error) => done({error: String(error)}));
"""


class Cutting:
    """A server whose streams are read over connections that are lost, and the texts that they have without that."""

    def __init__(self, server: Any, route: Route) -> None:
        self.server, self.route = server, route
        self.texts = [self._text(seed) for seed in range(NUM_TEXTS)]
        self.num_cuts = self.num_away = 0
        self._lock = threading.Lock()

    def _text(self, seed: int) -> str:
        status, answer, _ = self.server.post(self.route.path, self.route.body(seed))
        assert status == 200, answer
        return self.route.text_of(answer)

    def _read_until(self, num_cuts: int, *, may_be_away: bool) -> None:
        """Reads streams, several at a time, until so many connections are lost."""
        port = urlsplit(self.server.url).port
        assert port is not None

        def read(_: int) -> None:
            while self.num_cuts < num_cuts:
                number = next(NUMBERS)
                body = json.dumps(self.route.body(number % NUM_TEXTS, stream=True)).encode()
                reader = CutReader(port, self.route, body, f"cut-{number}", random.Random(number), may_be_away)
                with contextlib.closing(reader):
                    assert reader.read_all(self._count_cut) == self.texts[number % NUM_TEXTS]
                    assert may_be_away or reader.whole() == reader.events
                self.num_away += reader.num_away

        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(read, range(NUM_READERS)))

    def _count_cut(self) -> None:
        with self._lock:
            self.num_cuts += 1

    def read_beside(self, action: Callable[[], None], *, may_be_away: bool = True) -> None:
        """Reads streams until `NUM_CUTS` connections are lost; several times meanwhile, `action` is called."""
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._read_until, NUM_CUTS, may_be_away=may_be_away)
            for count in range(1, NUM_FAULTS + 1):
                while self.num_cuts < NUM_CUTS * count // (NUM_FAULTS + 1) and not reading.done():
                    time.sleep(0.01)
                if not reading.done():
                    action()
            reading.result()


@pytest.mark.parametrize("name", ROUTES)
def test_cuts_and_engine_cores_that_are_killed_change_no_text(serve: Callable[..., Any], name: str) -> None:
    with serve("--api-server-count", "2") as server:

        def kill() -> None:
            os.kill(server.engine_pid(), signal.SIGKILL)
            server.wait_for(lambda: server.get_status("/ready") == 503, "recovering server")
            server.wait_for(lambda: server.get_status("/ready") == 200, "recovered server")

        Cutting(server, ROUTES[name]).read_beside(kill, may_be_away=False)
        assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == NUM_FAULTS
        assert "Traceback" not in server.log


def test_cuts_and_api_processes_that_are_killed_change_no_text(serve: Callable[..., Any], tmp_path: Path) -> None:
    with serve("--api-server-count", "2", "--state-dir", str(tmp_path / "state")) as server:
        turns = itertools.cycle(range(2))

        def kill() -> None:
            victim = server.api_pids()[next(turns)]
            os.kill(victim, signal.SIGKILL)
            server.wait_for(lambda: len({*server.api_pids()} - {victim}) == 2, "another API process")

        Cutting(server, ROUTES["chat"]).read_beside(kill)
        assert "streams go on" in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("name", ["completions", "chat", "messages"])
def test_cuts_and_servers_that_are_killed_as_a_whole_change_no_text(
    launch: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start() -> Any:
        return launch("--api-server-count", "2", "--state-dir", str(tmp_path / "state"), "--port", port)

    server = start()
    server.wait_until_ready()
    cutting = Cutting(server, ROUTES[name])

    def restart() -> None:
        cutting.server.kill_all()
        cutting.server = start()
        cutting.server.wait_until_ready()

    cutting.read_beside(restart)
    assert cutting.num_away
    assert "streams go on" in cutting.server.log
    assert "Traceback" not in cutting.server.log


def test_a_thousand_cuts_of_a_page_change_no_text(serve: Callable[..., Any]) -> None:
    from browser_helpers import open_browser  # skips where there is none

    with serve("--api-server-count", "2") as server, open_browser() as browser:
        asked = [
            {
                "path": route.path,
                "body": json.dumps(route.body(1, stream=True)),
                "text": Cutting(server, route).texts[1],
            }
            for route in ROUTES.values()
        ]
        browser.set_script_timeout(540)
        browser.get(f"{server.url}/live")
        found = browser.execute_async_script(BROWSER, asked, LAST_EVENTS, NUM_CUTS, MAX_BYTES)
    assert "error" not in found, found["error"]
    assert found["cuts"] >= NUM_CUTS
    assert [set(texts) for texts in found["texts"]] == [{one["text"]} for one in asked]
