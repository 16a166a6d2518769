"""Every flag that vLLM's benchmark commands publish is done, without effect for a reason, or refused in a sentence."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.commands import SUBCOMMANDS, load_subcommand
from llmstack_bench.commands.foreign_flags import vllm_flags
from llmstack_bench.commands.serve import DATASETS
from llmstack_bench.commands.values import dataset_name
from llmstack_bench.commands.vllm_flags import BACKENDS
from llmstack_bench.serving import model_names
from llmstack_bench.testing import FakeServer
from llmstack_command.main import main

COMMANDS = [name for name in vllm_flags() if name != "vllm"]
TABLE: dict[str, Any] = vllm_flags()["serve"]
# Values of the flags of `serve` that are done; what is absent here is a switch.
VALUES: dict[str, list[str]] = {
    "--backend": ["vllm"], "--burstiness": ["2"], "--custom-output-len": ["4"], "--dataset-name": ["random"],
    "--endpoint": ["/v1/completions"], "--extra-body": ['{"min_tokens": 1}'], "--frequency-penalty": ["0.1"],
    "--goodput": ["ttft:9000", "tpot:9000"], "--header": ["a=b", "c=d"], "--hf-output-len": ["4"],
    "--hf-split": ["train"], "--hf-subset": ["main"], "--host": ["127.0.0.1"], "--input-len": ["4"], "--label": ["x"],
    "--logprobs": ["1"], "--lora-assignment": ["round-robin"], "--lora-modules": ["a", "b"], "--max-concurrency": ["1"],
    "--metadata": ["gpu=none", "tp=1"], "--metric-percentiles": ["25,50,99"], "--min-p": ["0.1"], "--model": ["m"],
    "--num-prompts": ["2"], "--num-warmups": ["0"], "--output-len": ["2"], "--percentile-metrics": ["ttft,tpot"],
    "--prefix-repetition-num-prefixes": ["2"], "--prefix-repetition-output-len": ["2"],
    "--prefix-repetition-prefix-len": ["4"], "--prefix-repetition-suffix-len": ["4"], "--presence-penalty": ["0.1"],
    "--ramp-up-end-rps": ["900", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "500"],
    "--ramp-up-start-rps": ["500", "--ramp-up-strategy", "linear", "--ramp-up-end-rps", "900"],
    "--ramp-up-strategy": ["linear", "--ramp-up-start-rps", "500", "--ramp-up-end-rps", "900"],
    "--random-input-len": ["4"], "--random-output-len": ["2"], "--random-prefix-len": ["2"],
    "--random-range-ratio": ['{"input": 0.5, "output": 0.0}'], "--ready-check-timeout-sec": ["5"],
    "--repetition-penalty": ["1.1"], "--request-id-prefix": ["p-"], "--request-rate": ["900"],
    "--result-dir": ["."], "--result-filename": ["r.json"], "--seed": ["3"], "--served-model-name": ["m"],
    "--sharegpt-output-len": ["4"], "--spec-bench-category": ["a"], "--spec-bench-output-len": ["4"],
    "--temperature": ["0.5"], "--timed-trace-chunk-hash-size": ["8"], "--timed-trace-label-hash-ids": ["h"],
    "--timed-trace-label-input-length": ["i"], "--timed-trace-label-output-length": ["o"],
    "--timed-trace-label-timestamp": ["t"], "--timed-trace-sec-multiplier": ["0.001"], "--top-k": ["5"],
    "--top-p": ["0.9"],
}  # fmt: skip
# What only means something beside others, or needs files; each has a test of its own.
ELSEWHERE = {"--base-url", "--port", "--dataset-path", "--tokenizer", "--chat-template-kwargs", "--self-timed"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_published_flag_is_declared_and_has_one_meaning(command: str) -> None:
    parser = argparse.ArgumentParser()
    load_subcommand(SUBCOMMANDS[command][0]).add_arguments(parser)  # a flag declared twice is an error of argparse
    table = vllm_flags()[command]
    assert set(table["published"]) <= set(parser._option_string_actions)
    assert {*table["no_effect"], *table["refused"]} <= set(table["published"])


def test_every_flag_of_serve_is_tried_on_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fixed = ["--num-prompts", "1", "--random-input-len", "4", "--random-output-len", "1", "--result-dir", str(tmp_path)]
    with FakeServer() as server:
        for flag in sorted(set(TABLE["published"]) - ELSEWHERE):
            values = VALUES.get(flag, ["x"] if flag in ("--hf-name", "--tokenizer-mode") else [])
            line = ["bench", "serve", "--base-url", server.url, *fixed, flag, *values]
            status, said = main(line), capsys.readouterr()
            if flag in TABLE["refused"]:
                assert (status, f"{flag}: {TABLE['refused'][flag]}" in said.err) == (2, True), flag
            else:
                assert (status, "completed" in said.out) == (0, True), (flag, said.err)
            assert (f"{flag}: no effect: " in said.err) is (flag in TABLE["no_effect"])


@pytest.mark.parametrize("flag", ["--dataset-name", "--backend"])
def test_every_published_value_is_done_or_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in TABLE["published_values"][flag]:
        name = value.replace("_", "-")
        if name in TABLE["refused_values"][flag]:
            assert main(["bench", "serve", flag, value]) == 2
            assert f"'{value}': {TABLE['refused_values'][flag][name]}" in capsys.readouterr().err
        else:
            assert (dataset_name(value) in DATASETS) if flag == "--dataset-name" else (value in BACKENDS)


def test_adapters_request_ids_and_profiles_reach_the_server(tmp_path: Path) -> None:
    with FakeServer() as server:
        line = ["bench", "serve", "--base-url", server.url, "--random-output-len", "1", "--num-prompts", "4"]
        adapters = ["--lora-modules", "a", "b", "--lora-assignment", "round-robin", "--max-concurrency", "1"]
        assert main([*line, *adapters, "--num-warmups", "0", "--request-id-prefix", "p-", "--profile"]) == 0
        assert [body["model"] for body in server.bodies] == ["a", "b", "a", "b"]
        assert [path for path in server.paths if "profile" in path] == ["/start_profile", "/stop_profile"]
        assert [headers["x-request-id"] for headers in server.headers if "x-request-id" in headers] == [
            "p-0", "p-1", "p-2", "p-3",
        ]  # fmt: skip
        kwargs = ["--chat-template-kwargs", '{"enable_thinking": false}']
        assert main([*line, *kwargs]) == 2
        assert main([*line, *kwargs, "--backend", "openai-chat"]) == 0
        assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    drawn = model_names(argparse.Namespace(lora_modules=["a", "b"], lora_assignment="random", seed=1), "m")
    assert {next(drawn) for _ in range(20)} == {"a", "b"}


def test_a_timed_trace_is_sent_with_its_prefixes_and_at_its_times(tmp_path: Path) -> None:
    rows = [{"at": 20, "i": 12, "output_length": 1, "h": [1, 2]}, {"at": 0, "i": 10, "output_length": 1, "h": [1, 3]}]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer() as server:
        line = f"bench serve --base-url {server.url} --dataset-path {path} --timed-trace-label-timestamp at"
        labels = "--timed-trace-label-input-length i --timed-trace-label-hash-ids h --timed-trace-chunk-hash-size 8"
        timed = [*line.split(), *labels.split(), "--dataset-name", "timed_trace", "--num-warmups", "0"]
        result = tmp_path / "r.json"
        assert main([*timed, "--timed-trace-sec-multiplier", "0.001", "--output-json", str(result)]) == 0
        first, second = (body["prompt"] for body in server.bodies)
        assert (len(first), len(second)) == (10, 12)
        assert first[:8] == second[:8] != first[2:10]
        assert json.loads(result.read_text())["duration"] >= 0.02
        assert main([*timed, "--no-self-timed", "--timed-trace-sec-multiplier", "90"]) == 0  # or it would take long
        assert main(["bench", "serve", "--base-url", server.url, "--self-timed"]) == 2
        path.write_text('{"at": 1}\n')
        assert main(timed) == 2


def test_a_tokenizer_is_found_in_the_hubs_cache_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with FakeServer() as server:
        line = ["bench", "serve", "--base-url", server.url, "--num-prompts", "1", "--tokenizer", "org/name"]
        assert main(line) == 2
        assert "--tokenizer org/name: no such file" in capsys.readouterr().err
        folder = tmp_path / "models--org--name" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
        assert main(line) == 2
        assert "--vocab-size 1: must be above" in capsys.readouterr().err  # so it was read
