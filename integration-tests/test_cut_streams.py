"""A stream whose reader is cut off at random bytes, over and over, ends with the exact text."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cut_readers import LAST_EVENTS, MAX_BYTES, ROUTES, CutReader, Route
from engine_core_helpers.ports import free_port
from other_weights import write_checkpoints

NUM_CUTS = 1000
NUM_READERS = 4
NUM_TEXTS = 3
NUM_FAULTS = 3
# Twelve reloads load weights fourteen times, which takes a busy machine more than the usual limit.
MANY = (pytest.mark.full, pytest.mark.timeout(360))
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
    """A server whose streams are read over connections that are lost, and the texts that they have without that.

    Attributes:
        texts: By the fingerprint of the weights that answered, which is empty where answers name none.
    """

    def __init__(self, server: Any, route: Route) -> None:
        self.server, self.route = server, route
        self.texts: dict[str, list[str]] = {}
        self.num_cuts = self.num_away = 0
        self._is_disturbed = False
        self._read: list[tuple[str, int, str]] = []  # fingerprints, seeds and texts
        self._lock = threading.Lock()
        self.learn()

    def learn(self) -> list[str]:
        """The texts of the weights that answer now."""
        answers = [self._answer(seed) for seed in range(NUM_TEXTS)]
        texts = [self.route.text_of(answer) for answer in answers]
        self.texts[answers[0].get("system_fingerprint", "")] = texts
        return texts

    def _answer(self, seed: int) -> Any:
        status, answer, _ = self.server.post(self.route.path, self.route.body(seed))
        assert status == 200, answer
        return answer

    def _read_until(self, num_cuts: int, *, may_be_away: bool) -> None:
        """Reads streams, several at a time, until so many connections are lost and the server is left alone."""
        port = urlsplit(self.server.url).port
        assert port is not None

        def read(_: int) -> None:
            while self.num_cuts < num_cuts or self._is_disturbed:
                number = next(NUMBERS)
                body = json.dumps(self.route.body(number % NUM_TEXTS, stream=True)).encode()
                reader = CutReader(port, self.route, body, f"cut-{number}", random.Random(number), may_be_away)
                with contextlib.closing(reader):
                    text = reader.read_all(self._count_cut)
                    self._read.append((reader.fingerprint, number % NUM_TEXTS, text))
                    assert may_be_away or reader.whole() == reader.events
                self.num_away += reader.num_away

        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(read, range(NUM_READERS)))

    def _count_cut(self) -> None:
        with self._lock:
            self.num_cuts += 1

    def read_beside(
        self,
        action: Callable[[], None],
        *,
        may_be_away: bool = True,
        num_cuts: int = NUM_CUTS,
        num_actions: int = NUM_FAULTS,
    ) -> None:
        """Reads streams until so many connections are lost; several times meanwhile, `action` is called."""
        self._is_disturbed = True
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self._read_until, num_cuts, may_be_away=may_be_away)
            try:
                for count in range(1, num_actions + 1):
                    while self.num_cuts < num_cuts * count // (num_actions + 1) and not reading.done():
                        time.sleep(0.01)
                    action()
            finally:
                self._is_disturbed = False
            reading.result()
        for fingerprint, seed, text in self._read:
            assert text == self.texts[fingerprint][seed]


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("name", "num_cuts", "num_reloads"),
    [
        pytest.param("completions", 60, 2, id="few"),
        pytest.param("completions", 1000, 12, id="many-of-completions", marks=MANY),
        pytest.param("chat", 1000, 12, id="many-of-chats", marks=MANY),
    ],
)
def test_cuts_and_reloads_change_no_text(
    serve: Callable[..., Any], tmp_path: Path, name: str, num_cuts: int, num_reloads: int
) -> None:
    """Streams finish with the weights that they name, and those that move keep the text of theirs."""
    write_checkpoints(tmp_path)
    options = ("--served-model-name", "llmstack-demo", "--enable-control-routes", "--api-server-count", "2")
    entries = (f"next={tmp_path / 'next'}", '{"name": "larger", "num_kv_blocks": 4096}')
    with serve(str(tmp_path / "first"), *options, "--reload-models", *entries) as server:
        cutting, num_finishing, num_moved = Cutting(server, ROUTES[name]), 0, 0
        orders = itertools.cycle([("larger", "move"), ("next", "finish"), ("start", "finish"), ("larger", "move")])

        def reload() -> None:
            nonlocal num_finishing, num_moved
            entry, running = next(orders)

            def is_done() -> bool:  # refused while streams run in the engine core before the last one
                status, answer, _ = server.post("/v1/reload", {"name": entry, "running": running})
                assert status == 200 or "still run" in answer["error"]["message"], answer
                found.update(answer)
                return bool(status == 200)

            found: dict[str, Any] = {}
            server.wait_for(is_done, "reload")
            num_finishing += found["num_finishing_requests"]
            num_moved += found["num_moved_requests"]
            cutting.learn()

        cutting.read_beside(reload, may_be_away=False, num_cuts=num_cuts, num_actions=num_reloads)
        if num_reloads > 2:  # a few may meet no running request: the demo model is fast
            assert num_finishing
            assert num_moved
        assert len(cutting.texts) == 3
        assert "Traceback" not in server.log
        assert "lost" not in server.log


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("name", ["completions", "chat", "messages"])
def test_cuts_and_servers_that_are_killed_as_a_whole_change_no_text(
    launch: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    port = str(free_port())

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


@pytest.mark.full
def test_a_thousand_cuts_of_a_page_change_no_text(serve: Callable[..., Any]) -> None:
    from browser_helpers import open_browser  # skips where there is none

    with serve("--api-server-count", "2") as server, open_browser() as browser:
        asked = [
            {
                "path": route.path,
                "body": json.dumps(route.body(1, stream=True)),
                "text": Cutting(server, route).learn()[1],
            }
            for route in ROUTES.values()
        ]
        browser.set_script_timeout(540)
        browser.get(f"{server.url}/live")
        found = browser.execute_async_script(BROWSER, asked, LAST_EVENTS, NUM_CUTS, MAX_BYTES)
    assert "error" not in found, found["error"]
    assert found["cuts"] >= NUM_CUTS
    assert [set(texts) for texts in found["texts"]] == [{one["text"]} for one in asked]
