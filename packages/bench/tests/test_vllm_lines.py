"""Lines of `vllm bench serve` are taken as they are, and read published data sets from files."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.arrivals import ramped_arrival_times
from llmstack_bench.commands.serve import ServeBench, with_defaults
from llmstack_bench.commands.vllm_flags import resolved
from llmstack_bench.datasets import request_maker
from llmstack_bench.errors import BenchError
from llmstack_bench.testing import FakeServer
from llmstack_bench.workload import BenchRequest
from llmstack_command.main import main


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeBench().add_arguments(parser)
    return resolved(with_defaults(parser.parse_args(arguments)))


def requests_of(name: str, path: Path, *arguments: str) -> list[BenchRequest]:
    given = options("--dataset-name", name, "--dataset-path", str(path), *arguments)
    return request_maker(given, 256, is_chat=False)(0)


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def turns(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_gives_first_questions_with_the_lengths_of_their_answers(tmp_path: Path) -> None:
    rows = [turns("q" * 40, "a" * 80), turns("q", "a" * 80), turns("q" * 5000, "a"), {"conversations": []}, {}]
    path = written(tmp_path / "share.json", rows)
    assert requests_of("sharegpt", path, "--num-prompts", "2") == [BenchRequest("q" * 40, 20)] * 2
    once = requests_of("sharegpt", path, "--num-prompts", "5", "--no-oversample", "--sharegpt-output-len", "7")
    assert once == [BenchRequest("q" * 40, 7)]


def test_sonnets_share_their_first_lines_and_have_their_length(tmp_path: Path) -> None:
    path = written(
        tmp_path / "sonnet.txt", "".join(f"{index:02d} shall I compare thee to a day\n" for index in range(99))
    )
    lengths = ("--sonnet-input-len", "200", "--sonnet-prefix-len", "100", "--sonnet-output-len", "9")
    found = requests_of("sonnet", path, "--num-prompts", "4", *lengths)
    assert {request.num_output_tokens for request in found} == {9}
    assert all(abs(len(str(request.prompt)) // 4 - 200) < 20 for request in found)
    assert len({str(request.prompt)[:380] for request in found}) == 1
    assert len({str(request.prompt) for request in found}) == 4


def test_other_published_sets_are_read_from_files(tmp_path: Path) -> None:
    bench = written(
        tmp_path / "spec.jsonl", '{"turns": ["one", "x"], "category": "a"}\n{"turns": ["two"], "category": "b"}'
    )
    assert requests_of("spec_bench", bench, "--spec-bench-category", "b", "--num-prompts", "1") == [
        BenchRequest("two", 256)
    ]
    rows = [{"messages": [{"role": "user", "content": "hi"}]}, {"instruction": "do"}, {"turns": ["t"]}, {"n": 1}]
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "train.json", rows)
    named = requests_of("hf", tmp_path / "set", "--hf-split", "train", "--disable-shuffle", "--num-prompts", "3",
                        "--hf-output-len", "5")  # fmt: skip
    assert named == [BenchRequest("hi", 5), BenchRequest("do", 5), BenchRequest("t", 5)]
    table = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,9,9,18,C\n5,GPT-4,8,3,11,C\n"
    )
    [burst] = requests_of("burstgpt", written(tmp_path / "b.csv", table), "--num-prompts", "1")
    assert (len(burst.prompt), burst.num_output_tokens) == (8, 3)


@pytest.mark.parametrize(
    ("name", "file", "content", "words"),
    [
        ("sharegpt", "x.json", "{", "is no JSON"), ("sharegpt", "x.json", "[1]", "something else than objects"),
        ("sharegpt", "x.json", "[]", "no request of this kind"), ("hf", "x.parquet", "", "export it"),
        ("burstgpt", "x.csv", "a,b\n1,2\n", "no table of BurstGPT"), ("sonnet", "x.txt", "\n", "holds no lines"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_one_line(tmp_path: Path, name: str, file: str, content: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        requests_of(name, written(tmp_path / file, content))
    with pytest.raises(BenchError):
        requests_of(name, tmp_path / "absent")


@pytest.mark.parametrize(
    "line",
    [
        ["--backend", "openai-chat", "--endpoint", "/v1/completions"],
        ["--backend", "vllm", "--endpoint", "/v1/chat/completions"],
        ["--ramp-up-start-rps", "1"],
        ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"],
        ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2", "--request-rate", "1"],
        ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "3", "--ramp-up-end-rps", "2"],
    ],
)
def test_flags_that_exclude_each_other_are_named(line: list[str]) -> None:
    with pytest.raises(BenchError, match=r"--(endpoint|ramp-up|request-rate)") as caught:
        options(*line)
    assert caught.value.exit_code == 2


def test_a_backend_that_is_not_openais_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--backend", "tgi"]) == 2
    assert "tgi" in capsys.readouterr().err
    assert main(["bench", "serve", "--backend", "openai-embeddings"]) == 2
    assert "only generating routes" in capsys.readouterr().err


def test_one_length_holds_for_every_data_set_and_prefixes_have_vllms_names() -> None:
    found = options("--input-len", "9", "--output-len", "4")
    assert (found.random_input_len, found.sonnet_input_len, found.sonnet_output_len, found.random_output_len) == (
        9,
        9,
        4,
        4,
    )
    found = options("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "5",
                    "--prefix-repetition-num-prefixes", "3")  # fmt: skip
    assert (found.random_prefix_len, found.num_prefixes) == (5, 3)


def test_a_rate_rises_from_its_start_to_its_end() -> None:
    even = float("inf")
    linear = ramped_arrival_times(101, "linear", 1.0, 10.0, even)
    gaps = [later - sooner for sooner, later in itertools.pairwise(linear)]
    assert (gaps[0], gaps[-1]) == (pytest.approx(1.0), pytest.approx(0.1, rel=0.02))
    assert gaps[50] == pytest.approx(1 / 5.5)
    steep = ramped_arrival_times(101, "exponential", 1.0, 100.0, even)
    assert steep[51] - steep[50] == pytest.approx(0.1)
    assert len(ramped_arrival_times(1, "linear", 1.0, 2.0)) == 1


def test_a_pasted_line_runs_and_leaves_vllms_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "share.json", [turns("question " * 9, "answer " * 9)])
    with FakeServer() as server:
        line = (
            f"bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {server.url} --model org/m "
            f"--served-model-name m --dataset-name sharegpt --dataset-path {path} --num-prompts 3 --trust-remote-code "
            "--ramp-up-strategy linear --ramp-up-start-rps 500 --ramp-up-end-rps 900 --goodput ttft:9000 e2el:90000 "
            f"--percentile-metrics ttft,tpot --metric-percentiles 50,95 --save-result --result-dir {tmp_path} "
            "--top-p 0.9 --result-filename r.json --metadata gpu=none --max-concurrency 2 --seed 3 "
            "--ready-check-timeout-sec 1"
        )
        assert main(line.split()) == 0
        sent = server.bodies
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["model_id"], result["gpu"], result["backend"]) == (
        3,
        "m",
        "none",
        "openai-chat",
    )
    assert {"request_throughput", "p95_ttft_ms", "request_goodput"} <= set(result)
    assert {(body["model"], body["top_p"]) for body in sent} == {("m", 0.9)}
    assert main([*line.split(), "--append-result", "--result-filename", "lines.jsonl"]) == 1  # nothing listens any more
