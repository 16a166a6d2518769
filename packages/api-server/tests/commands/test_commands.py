"""The command line of `llmstack serve`: flags, environment, and what is refused."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.engine_options.speculation import check_speculative_config
from llmstack_server.commands import ServeCommand
from llmstack_server.options.command_line import SERVE_OPTIONS, settings_from
from llmstack_server.options.config import ServeConfig, config_from, is_loopback
from llmstack_server.options.environment import ignored_variables
from llmstack_server.options.errors import ServeError

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "zmq",
    "prometheus_client",
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServeCommand().add_arguments(parser)
    return parser.parse_args(line)


def config(*line: str, **variables: str) -> ServeConfig:
    return config_from(settings_from(parse(*line), variables))


def refusal(*line: str) -> str:
    """The text of the one error of a line."""
    with pytest.raises(ServeError) as caught:
        config(*line)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_defaults_are_those_of_vllm_where_it_has_them():
    found = config()
    assert (found.model, found.served_model_names) == (None, ("llmstack-demo",))
    assert (found.http.host, found.http.port, found.http.shutdown_timeout_s) == ("127.0.0.1", 8000, 30.0)
    engine = found.engine
    assert (engine.max_num_seqs, engine.block_size, engine.gpu_memory_utilization) == (256, 16, 0.9)
    assert engine.enable_prefix_caching
    assert engine.enable_chunked_prefill
    assert (engine.seed, engine.load_format, engine.scheduling_policy) == (0, "auto", "fair")
    assert found.http.has_metrics_aliases
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (["--max-num-seqs", "4"], "max_num_seqs", 4),
        (["--num-gpu-blocks-override", "9"], "num_kv_blocks", 9),
        (["--num-kv-blocks", "9"], "num_kv_blocks", 9),
        (["--kv-cache-memory-bytes", "1G"], "kv_cache_memory_bytes", 2**30),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill", False),
        (["--seed", "-3"], "seed", -3),
        (["--runner", "echo"], "runner", "echo"),
        (["--scheduling-policy", "priority"], "scheduling_policy", "priority"),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--disable-log-stats"], "disable_log_stats", True),
        (["--record-steps", "run.steps"], "record_steps", "run.steps"),
        (["--speculative-config", json.dumps(NGRAM)], "speculative_config", check_speculative_config(NGRAM)),
    ],
)
def test_engine_flags_reach_the_engine(line: list[str], name: str, value: Any):
    assert getattr(config(*line).engine, name) == value


@pytest.mark.parametrize(
    ("text", "length"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("-1", None), ("1M", 2**20)]
)
def test_lengths_may_have_suffixes(text: str, length: int | None):
    assert config("--max-model-len", text).engine.max_model_len == length


def test_dtype_aliases_and_names():
    assert config("--dtype", "half").engine.dtype == "float16"
    assert config("gpt2", "--served-model-name", "a", "b").served_model_names == ("a", "b")
    assert config("gpt2").served_model_names == ("gpt2",)
    assert config("--model", "gpt2").model == "gpt2"


def test_the_positional_model_wins_with_one_warning():
    found = config("a", "--model", "b")
    assert found.model == "a"
    assert [line for line in found.warnings if "b is ignored" in line] == list(found.warnings)
    assert config("a", "--model", "a").warnings == ()


def test_flags_come_before_our_variables_and_those_before_vllms():
    variables = {"LLMSTACK_PORT": "1", "VLLM_PORT": "2", "VLLM_HOST_IP": "127.0.0.2", "VLLM_API_KEY": "k"}
    found = config(**variables)
    assert (found.http.port, found.http.host, len(found.http.api_keys)) == (1, "127.0.0.2", 1)
    assert config("--port", "3", **variables).http.port == 3
    assert config(VLLM_LOGGING_LEVEL="DEBUG").http.log_level == "debug"


def test_other_variables_of_vllm_are_named_in_one_warning():
    found = config(VLLM_PLUGINS="x", VLLM_CACHE_ROOT="y", VLLM_USE_V1="1", VLLM_PORT="5")
    assert len(found.warnings) == 1
    assert "VLLM_CACHE_ROOT, VLLM_PLUGINS" in found.warnings[0]
    assert ignored_variables({"HOME": "x", "LLMSTACK_KERNELS": "reference"}, SERVE_OPTIONS) == []


def test_keys_are_kept_as_digests_and_argv_warns():
    found = config("--api-key", "sk-a", "sk-b")
    assert len(found.http.api_keys) == 2
    assert "sk-a" not in repr(found)
    assert any("LLMSTACK_API_KEY" in line for line in found.warnings)


def test_an_open_server_warns_loudly_and_require_auth_refuses():
    assert any("NO API KEY" in line for line in config("--host", "0.0.0.0").warnings)
    assert not config("--host", "0.0.0.0", LLMSTACK_API_KEY="k").warnings
    with pytest.raises(ServeError, match="--require-auth"):
        config("--require-auth")
    assert config("--require-auth", LLMSTACK_API_KEY="k").http.api_keys


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("a.example", False)],
)
def test_loopback_is_recognised(host: str, expected: bool):
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["-tp", "2", "--distributed-executor-backend", "uni"], "--tensor-parallel-size"),
        (["-pp", "4", "--async-scheduling"], "--pipeline-parallel-size"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_combinations_that_cannot_work_name_their_flag(line: list[str], word: str):
    with pytest.raises(ServeError, match=word) as caught:
        config(*line)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "variables", [{"LLMSTACK_PORT": "x"}, {"VLLM_PORT": "70000"}, {"LLMSTACK_LOGGING_LEVEL": "loud"}]
)
def test_wrong_variables_are_refused(variables: dict[str, str]):
    with pytest.raises(ServeError):
        config(**variables)


@pytest.mark.parametrize(
    "line",
    [
        ["--port", "70000"],
        ["--port", "x"],
        ["--max-num-seqs", "0"],
        ["--gpu-memory-utilization", "0"],
        ["--dtype", "int8"],
        ["--gpu-memory-utilization", "nan"],
        ["--shutdown-timeout", "-1"],
        ["--shutdown-timeout", "inf"],
        ["--block-size", "1.5"],
        ["--max-model-len", "k"],
        ["--max-model-len", "-2"],
        ["--gpu-memory-utilization", "x"],
        ["--shutdown-timeout", "x"],
        ["--speculative-config", "ngram"],
        ["--speculative-config", "[1]"],
    ],
)
def test_values_out_of_range_end_with_exit_code_2(line: list[str]):
    assert refusal(*line).startswith(f"{line[0]}: ")


def test_graph_capture_can_be_switched_off():
    assert config("--enforce-eager").engine.enforce_eager is True


@pytest.mark.parametrize("line", [["1", "4", "2"], ["1,4,2"], ["1,4", "2"]])
def test_capture_sizes_are_a_list_with_spaces_or_commas(line: list[str]):
    assert config("--cudagraph-capture-sizes", *line).engine.cudagraph_capture_sizes == (1, 4, 2)
    assert config().engine.cudagraph_capture_sizes is None


@pytest.mark.parametrize("size", ["0", "1,", "many", "2,-1"])
def test_a_capture_size_is_a_number_of_rows(size: str):
    assert refusal("--cudagraph-capture-sizes", size).startswith("--cudagraph-capture-sizes: ")


@pytest.mark.parametrize(
    ("line", "expected"), [([], None), (["--async-scheduling"], True), (["--no-async-scheduling"], False)]
)
def test_scheduling_ahead_is_decided_by_the_device_unless_it_is_asked_for(line: list[str], expected: bool | None):
    assert config(*line).engine.async_scheduling is expected


def test_swap_space_is_a_size_in_gib():
    assert config("--swap-space", "1.5").engine.swap_space == 1.5
    for wrong in ("-1", "nan", "inf", "much"):
        assert refusal("--swap-space", wrong).startswith("--swap-space: ")


def test_the_type_of_the_kv_cache_and_determinism_reach_the_engine():
    engine = config("--kv-cache-dtype", "fp8", "--enable-deterministic-inference").engine
    assert (engine.kv_cache_dtype, engine.enable_deterministic_inference) == ("fp8", True)
    assert refusal("--kv-cache-dtype", "int4").startswith("--kv-cache-dtype: invalid value 'int4'")


@pytest.mark.parametrize("flag", ["--quantization", "-q"])
def test_a_scheme_of_quantization_reaches_the_engine(flag: str):
    assert config(flag, "int4").engine.quantization == "int4"
    assert config().engine.quantization is None


@pytest.mark.parametrize("scheme", ["aqlm", "quip", "fp4", "x" * 1000, ""])
def test_other_schemes_of_quantization_are_refused_naming_those_there_are(scheme: str):
    text = refusal("--quantization", scheme)
    assert text.startswith(f"--quantization: invalid value '{scheme[:60]}")
    assert "choose from int8, int4, fp8" in text or "did you mean 'mxfp4'?" in text
    assert len(text) < 300


def test_flags_that_change_nothing_are_accepted():
    assert config("--disable-log-requests", "-tp", "1", "-pp", "1", "--enable-server-load-tracking").warnings == ()


def test_an_unusable_configuration_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]):
    assert ServeCommand().run(parse("-tp", "0")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_imports_nothing_heavy():
    program = (
        "import argparse, json, sys\n"
        "from llmstack_server.commands import ServeCommand\n"
        "parser = argparse.ArgumentParser()\n"
        "ServeCommand().add_arguments(parser)\n"
        "parser.format_help()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # Each of these takes a millisecond or more, and a line without a mistake, a key or a report needs none.
    costly = ("difflib", "glob", "hashlib", "pathlib", "platform", "urllib.parse")
    assert [name for name in (*HEAVY, *costly) if name in json.loads(ran.stdout)] == []


def test_a_dry_run_prints_every_option_with_its_source_and_loads_nothing_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "serve.yaml").write_text("port: 8001\nmax_num_seqs: 4\nblock_size: 8\n")
    monkeypatch.setenv("LLMSTACK_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("LLMSTACK_MAX_NUM_SEQ", "6")
    line = [
        "org/model",
        "--dry-run",
        "--config",
        str(tmp_path / "serve.yaml"),
        "--block-size",
        "32",
        "--api-key",
        "k-1",
    ]
    assert ServeCommand().run(parse(*line)) == 0
    written = capsys.readouterr()
    rows = {row.split()[0]: row.split()[1:] for row in written.out.splitlines()}
    assert rows["--port"] == ["8001", "--config", "serve.yaml"]
    assert rows["--max-num-seqs"] == ["5", "environment", "LLMSTACK_MAX_NUM_SEQS"]
    assert rows["--block-size"] == ["32", "command", "line"]
    assert rows["--seed"] == ["0", "default"]
    assert set(rows) == {option.declared.flag for option in SERVE_OPTIONS}
    assert "k-1" not in written.out + written.err
    assert "LLMSTACK_MAX_NUM_SEQ\n" in written.err
    assert "org/model are not checked" in written.err


def test_a_dry_run_refuses_a_model_that_cannot_run_with_a_line_for_each_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = {"architectures": ["NoSuchForCausalLM"], "vocab_size": 8, "quantization_config": {"quant_method": "aqlm"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ServeCommand().run(parse(str(tmp_path), "--dry-run")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert ["NoSuchForCausalLM" in lines[0], "aqlm" in lines[1], "no safetensors" in lines[2]] == [True] * 3
    assert ServeCommand().run(parse(str(tmp_path / "absent"), "--dry-run")) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_a_module_that_is_not_there_ends_the_start_before_anything_is_loaded():
    namespace = parse("--middleware", "absent_module:X", "--logits-processors", "llmstack_llm:LLM")
    assert ServeCommand().problems(namespace) == [
        "--middleware: there is no module 'absent_module' for absent_module:X"
    ]


def test_everything_wrong_is_reported_at_once(capsys: pytest.CaptureFixture[str]):
    line = [
        "--port",
        "x",
        "--dtype",
        "int3",
        "--enable-lora-bias",
        "--headless",
        "--api-server-count",
        "2",
        "--ssl-keyfile",
        "k",
    ]
    assert ServeCommand().run(parse(*line)) == 2
    faults = [row.removeprefix("llmstack serve: error: ") for row in capsys.readouterr().err.splitlines()]
    assert [fault.split()[0] for fault in faults] == [
        "--enable-lora-bias:", "--dtype:", "--port:", "--headless", "--ssl-keyfile",
    ]  # fmt: skip


def test_the_engine_core_starts_before_what_answers_http_is_imported():
    program = (
        "import argparse, contextlib, json, sys\n"
        "import llmstack_engine_client.processes.waiting_process as waiting_process\n"
        "from llmstack_server.commands import ServeCommand\n"
        "@contextlib.contextmanager\n"
        "def early_process(runner):\n"
        "    print(json.dumps([runner, *sorted(sys.modules)]))\n"
        "    raise SystemExit(0)\n"
        "    yield\n"
        "waiting_process.early_process = early_process\n"
        "parser = argparse.ArgumentParser()\n"
        "ServeCommand().add_arguments(parser)\n"
        "ServeCommand().run(parser.parse_args(sys.argv[1:]))"
    )
    for line, expected in (["-tp", "2"], "parallel"), (["--engine-address", "ipc:///x"], None):
        command = [sys.executable, "-c", program, *line]
        runner, *modules = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        late = (*HEAVY, "asyncio", "msgpack", "tempfile", "llmstack_engine_core.protocols", "llmstack_kv_cache")
        assert (runner, [name for name in late if name in modules]) == (expected, [])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], True),
        (["--headless"], True),
        (["--api-server-count", "2"], True),
        (["--disable-frontend-multiprocessing"], False),
        (["--engine-address", "ipc:///x"], False),
    ],
)
def test_engine_cores_start_here_unless_they_run_elsewhere_or_in_this_process(line: list[str], expected: bool):
    assert config(*line).starts_engine_processes is expected
