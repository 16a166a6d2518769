"""`llmstack bench serve` from its flags to its files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llmstack_bench import serving
from llmstack_bench.testing import Behaviour, FakeServer
from llmstack_command.main import main

SMALL = ("--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "3", "--disable-tqdm")


def bench(*arguments: str) -> int:
    return main(["bench", "serve", *arguments])


def result(folder: Path, *arguments: str) -> dict[str, Any]:
    assert bench(*arguments, "--output-json", str(folder / "r.json")) == 0
    return dict(json.loads((folder / "r.json").read_text()))


def test_two_servers_get_the_same_prompts_in_turns_and_new_ones_each_time(tmp_path: Path):
    with FakeServer() as one, FakeServer(Behaviour(token_delay_s=0.003)) as two:
        found = result(
            tmp_path, "--base-url", one.url, "--label", "fast", "--base-url", two.url, "--label", "slow",
            "--repetitions", "3", "--max-concurrency", "1", "--num-warmups", "2", *SMALL,
        )  # fmt: skip
    assert [server["label"] for server in found["servers"]] == ["fast", "slow"]
    assert [len(server["runs"]) for server in found["servers"]] == [3, 3]
    assert found["servers"][1]["ratio_to_first"]["output_throughput"] < 1
    prompts = [[tuple(body["prompt"]) for body in server.bodies] for server in (one, two)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == len(prompts[0]) == 2 + 3 * 4


def test_a_run_says_what_was_sent_and_leaves_keys_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    with FakeServer() as server:
        found = result(tmp_path, "--base-url", server.url, "--preset", "w3-c8", "--header", "X-Key=secret-2", *SMALL)
    workload = found["workload"]
    assert (workload["preset"], workload["max_concurrency"], workload["num_prompts"]) == ("w3-c8", 8, 4)
    assert workload["vocab_size"] == 256
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_lines_of_a_file_are_sent_with_their_own_lengths(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 2}\n{"prompt": "c", "output_tokens": 4}\n')
    with FakeServer() as server:
        found = result(
            tmp_path, "--base-url", server.url, "--dataset-name", "custom", "--dataset-path", str(path),
            "--num-warmups", "0",
        )  # fmt: skip
    assert found["servers"][0]["median"]["total_output_tokens"] == 6
    assert sorted(body["prompt"] for body in server.bodies) == ["a b", "c"]
    assert not any("ignore_eos" in body for body in server.bodies)


def test_a_chat_route_gets_text(tmp_path: Path):
    with FakeServer() as server:
        result(tmp_path, "--base-url", server.url, "--endpoint", "/v1/chat/completions", *SMALL)
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert all(len(content.split()) == 6 for content in contents)


def test_a_trace_sends_at_its_own_times_unless_a_rate_is_given(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": n * 200, "input_length": 5, "output_length": 2, "hash_ids": [n]} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    line = ("--dataset-name", "trace", "--dataset-path", str(path), "--save-detailed", "--num-warmups", "0")
    with FakeServer() as server:
        timed = result(tmp_path, "--base-url", server.url, *line, "--trace-speed", "4")
        at_once = result(tmp_path, "--base-url", server.url, *line, "--request-rate", "inf")
    starts = [record["start_s"] for record in timed["servers"][0]["runs"][0]["requests"]]
    assert [start >= planned for start, planned in zip(starts, [0, 0.05, 0.1], strict=True)] == [True] * 3
    assert at_once["servers"][0]["runs"][0]["max_in_flight"] == 3


def test_streams_are_measured_with_and_without_pictures_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with FakeServer(Behaviour(token_delay_s=0.01)) as server:
        found = result(
            tmp_path, "--base-url", server.url, "--label", "one", "--preset", "w-image", *SMALL, "--repetitions", "2",
            "--num-pictures", "2", "--picture-size", "40x30", "--picture-interval", "0.01", "--num-warmups", "0",
        )  # fmt: skip
    alone, both = found["servers"]
    assert (alone["label"], both["label"]) == ("one, text alone", "one")
    assert [run["completed"] for run in alone["runs"] + both["runs"]] == [4, 4, 6, 6]
    assert "p99_itl_ms" in both["ratio_to_first"]
    assert "one/one, text alone" in capsys.readouterr().out
    contents = [body["messages"][0]["content"] for body in server.bodies]
    pictures = [content[0]["image_url"]["url"] for content in contents if isinstance(content, list)]
    assert len(set(pictures)) == len(pictures) == 4
    assert [len(set(contents[start : start + size])) for start, size in ((0, 4), (16, 4))] == [4, 4]
    image = Image.open(io.BytesIO(base64.b64decode(pictures[0].removeprefix("data:image/png;base64,"))))
    assert (image.mode, image.size, len(image.getcolors())) == ("RGB", (40, 30), 40)


def test_goodput_pictures_and_results_with_a_time_in_their_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with FakeServer() as server:
        code = bench(
            "--base-url", server.url, *SMALL, "--goodput", "ttft:100000", "tpot:100000", "--plot",
            str(tmp_path / "p.html"), "--save-result", "--result-dir", str(tmp_path / "results"), "--bandwidth",
        )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "good requests, share" in out
    assert "memory read before each run" in out
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert len(list((tmp_path / "results").glob("llmstack-bench-serve-*.json"))) == 1


def test_some_failures_are_reported_and_all_failures_are_an_exit_code(capsys: pytest.CaptureFixture[str]):
    with FakeServer(Behaviour(breaks_after=1)) as server:
        assert bench("--base-url", server.url, "--label", "bad", *SMALL, "--num-warmups", "0") == 1
    assert "failed (bad): 4 x the stream ended early" in capsys.readouterr().out


def test_what_was_measured_before_an_interruption_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_load, num_calls = serving.run_load, 0

    async def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return await run_load(*args, **kwargs)

    monkeypatch.setattr(serving, "run_load", interrupted)
    with FakeServer() as server:
        assert bench("--base-url", server.url, "--repetitions", "5", *SMALL) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "requests completed" in captured.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--base-url", "127.0.0.1:8000"), "--base-url"),
        (("--base-url", "http://a", "--base-url", "http://b", "--label", "x"), "--label: give 2 different labels"),
        (("--base-url", "http://a", "--base-url", "http://a"), "--label: give 2 different labels"),
        (("--model", "a", "--model", "b"), "--model: give one for all"),
        (("--percentile-metrics", "ttft,speed"), "unknown metric 'speed'"),
        (("--goodput", "speed:3"), "--goodput speed:3"),
        (("--metric-percentiles", "150"), "--metric-percentiles"),
        (("--plot", "x.gif"), "--plot x.gif"),
        (("--dataset-name", "nonsense"), "--dataset-name"),
        (("--dataset-name", "pictures"), "--dataset-name pictures: needs a route of chat/completions"),
        (("--preset", "w-image", "--picture-size", "9"), "is no size such as 2048x1536"),
        (("--preset", "w-image", "--picture-size", "90000x900"), "50000000 pixels the most"),
        (("--preset", "w-image", "--num-pictures", "90"), "--num-pictures 90: 200000000 pixels together"),
        (("--num-prompts", "0"), "below the minimum of 1"),
        (("--extra-body", "[1]"), "is not a JSON object"),
        (("--header", "x"), "not KEY=VALUE"),
        (("--request-rate", "-1"), "not above 0"),
    ],
)
def test_a_wrong_value_is_one_line_before_anything_is_sent(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


def test_a_file_is_needed_for_a_dataset_of_a_file(capsys: pytest.CaptureFixture[str]):
    with FakeServer() as server:
        assert bench("--base-url", server.url, "--dataset-name", "trace") == 2
    assert "--dataset-path: is needed" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert bench("--base-url", "http://127.0.0.1:9") == 1
    assert "http://127.0.0.1:9/v1/models returns no list of models" in capsys.readouterr().err
