"""Offline benchmarks, over the echo runner."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.commands.offline import ENGINE_FLAGS, LatencyBench, ThroughputBench
from llmstack_bench.errors import BenchError
from llmstack_bench.offline import latency_values, refuse_slow_kernels
from llmstack_command.main import main
from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.option import options_of
from llmstack_llm.testing import write_model_folder

ECHO = ("--engine-option", "runner=llmstack_engine_core.testing:EchoModelRunner", "--engine-option", "num-kv-blocks=64")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model_folder(tmp_path / "model"))


def results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["results"])


def test_throughput_counts_the_tokens_of_all_requests(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.json"
    line = ["bench", "throughput", "--model", model, *ECHO, "--num-prompts", "6", "--input-len", "20"]
    assert main([*line, "--output-len", "5", "--output-json", str(path)]) == 0
    found = results(path)
    assert found["completed"] == 6
    assert found["output_tokens_per_second"] * found["duration"] == pytest.approx(30)
    assert found["prompt_tokens_per_second"] * found["duration"] == pytest.approx(120)
    assert found["cached_prompt_share"] == 0
    assert "output tokens per second" in capsys.readouterr().out


def test_lines_of_vllm_bench_throughput_run_over_a_published_set(model: str, tmp_path: Path):
    rows = [{"conversations": [{"value": "question " * 4}, {"value": "answer " * 3}]}]
    (tmp_path / "share.json").write_text(json.dumps(rows))
    line = (
        f"bench throughput --backend vllm --model {model} --dataset-name sharegpt --dataset-path {tmp_path}/share.json "
        "--num-prompts 3 --num-iters-warmup 0 --sharegpt-output-len 4 --max-num-seqs 2 --enforce-eager -tp 1 --n 2 "
        f"--block-size 8 --no-enable-prefix-caching --trust-remote-code --output-json {tmp_path}/r.json"
    )
    assert main([*line.split(), *ECHO]) == 0
    found = results(tmp_path / "r.json")
    assert found["output_tokens_per_second"] * found["duration"] == pytest.approx(24)
    assert found["cached_prompt_share"] == 0
    assert main(["bench", "throughput", "--model", model, *ECHO, "--dataset-name", "sharegpt"]) == 2


def test_offline_flags_of_vllm_change_what_is_measured(model: str, tmp_path: Path):
    path = tmp_path / "r.json"
    line = f"bench latency --model {model} --batch-size 2 --input-len 8 --output-len 4 --num-iters 1 --n 2"
    asked = [*line.split(), *ECHO, "--num-iters-warmup", "0", "--output-json", str(path)]
    assert main([*asked, "--disable-detokenize"]) == 0
    assert main([*asked, "--use-beam-search"]) == 0
    line = (
        f"bench throughput --model {model} --num-prompts 4 --random-input-len 8 --random-output-len 4 --num-warmups 1"
    )
    varied = [
        "--random-range-ratio",
        '{"input": 0.0, "output": 0.5}',
        "--prequeue-requests",
        "--random-prefix-len",
        "3",
    ]
    assert main([*line.split(), *varied, *ECHO, "--output-json", str(path)]) == 0
    found = results(path)
    assert found["prompt_tokens_per_second"] * found["duration"] == pytest.approx(44)
    assert 8 <= round(found["output_tokens_per_second"] * found["duration"]) <= 24
    assert main([*asked, "--profile"]) == 1  # this runner has no profiler


def test_latency_measures_batches_whose_prompts_no_cache_has_seen(model: str, tmp_path: Path):
    path = tmp_path / "r.json"
    line = ["bench", "latency", "--model", model, *ECHO, "--batch-size", "2", "--num-iters", "4"]
    assert main([*line, "--output-len", "3", "--output-json", str(path)]) == 0
    found = results(path)
    assert 0 < found["p10_latency_ms"] <= found["median_latency_ms"] <= found["p99_latency_ms"]
    assert found["cached_prompt_share"] == 0
    assert found["peak_rss_mib"] > 1


def test_a_shared_prefix_is_found_in_the_cache(model: str, tmp_path: Path):
    path = tmp_path / "r.json"
    line = ["bench", "throughput", "--model", model, *ECHO, "--num-prompts", "4", "--input-len", "4"]
    assert main([*line, "--prefix-len", "32", "--output-len", "2", "--output-json", str(path)]) == 0
    assert results(path)["cached_prompt_share"] > 0.5


def test_values_of_a_latency_are_exact():
    values = latency_values([0.003, 0.001, 0.002])
    assert (values["median_latency_ms"], values["mean_latency_ms"]) == pytest.approx((2, 2))
    assert values["p90_latency_ms"] == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--engine-option", "wrong=1"], "wrong"), (["--max-model-len", "8"], "maximum context length"),
     (["--load-format", "pickle"], "load_format")],
)  # fmt: skip
def test_what_the_engine_refuses_ends_the_command_with_its_words(
    model: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "latency", "--model", model, *ECHO, *arguments]) == 1
    error = capsys.readouterr().err
    assert "llmstack bench latency: error:" in error
    assert reason in error


def test_without_the_engine_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    namespace = argparse.Namespace(model="any")
    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(BenchError, match=r"llmstack-bench\[offline\]"):
        LatencyBench().run(namespace)


def test_nothing_is_measured_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMSTACK_KERNELS", raising=False)
    refuse_slow_kernels({})  # a model runner without kernels
    refuse_slow_kernels({"rms_norm": "native (avx2)"})
    refuse_slow_kernels({"rms_norm": "triton"})
    with pytest.raises(BenchError, match="build_native"):
        refuse_slow_kernels({"rms_norm": "reference"})
    monkeypatch.setenv("LLMSTACK_KERNELS", "reference")
    refuse_slow_kernels({"rms_norm": "reference"})


def test_flags_of_the_engine_are_what_it_declares(capsys: pytest.CaptureFixture[str]) -> None:
    declared = {option.declared.flag: option for option in options_of(EngineArgs)}
    assert set(ENGINE_FLAGS) <= declared.keys()
    parser = argparse.ArgumentParser()
    ThroughputBench().add_arguments(parser)
    line = "--model x --max-num-batched-tokens 4k -tp 2 --no-enforce-eager --num-gpu-blocks-override 7 --block-size 8"
    given = vars(parser.parse_args(line.split()))
    assert (given["max_num_batched_tokens"], given["tensor_parallel_size"], given["num_kv_blocks"]) == (4000, 2, 7)
    assert given["enforce_eager"] is False
    assert given["enable_prefix_caching"] is None
    with pytest.raises(SystemExit):
        parser.parse_args([*line.split(), "--block-size", "0"])
    assert "--block-size: must be at least 1" in capsys.readouterr().err
