"""`--models FILE`: what the file may say, whose it is, and what cannot stand beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from llmstack_server.options.command_line import add_serve_arguments, settings_from
from llmstack_server.options.config import ServeConfig, ServedModels
from llmstack_server.options.errors import ServeError
from llmstack_server.options.models_file import read_models_file
from llmstack_server.options.several_models import serve_config

ONE = "  one: {model: /m/one, memory: 1G}\n"
GOOD = f"memory: 2G\nmodels:\n{ONE}"


def write(folder: Path, text: str) -> str:
    path = folder / "models.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def config(*line: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return serve_config(settings_from(parser.parse_args(line), {}))


def problems(*line: str) -> str:
    with pytest.raises(ServeError) as caught:
        config(*line)
    assert caught.value.exit_code == 2
    return str(caught.value)


def models_of(found: ServeConfig) -> ServedModels:
    assert found.models is not None
    return found.models


def test_each_model_gets_a_configuration_of_its_own(tmp_path: Path):
    path = write(
        tmp_path,
        "memory: 24G\nloads_per_minute: 3\nload_timeout: 2m\nmodels:\n"
        "  small:\n    model: /m/small\n    memory: 1.5G\n    idle_sleep: 10m\n    sleep_level: 2\n"
        "    aliases: [gpt-4o, gpt-4o-mini]\n    flags: {max_model_len: 4k, tool-call-parser: hermes}\n"
        "  org/large:7b:\n    model: org/large\n    memory: 16G\n",
    )
    found = config("--models", path, "--max-num-seqs", "8", "--port", "9000")
    file, models = models_of(found)
    assert (file.memory_bytes, file.loads_per_minute, file.load_timeout_s) == (24 << 30, 3, 120.0)
    small, large = (model.config for model in models)
    assert models_of(found).names == ("small", "gpt-4o", "gpt-4o-mini", "org/large:7b")
    assert found.served_model_names == models_of(found).names
    assert (small.model, large.model) == ("/m/small", "org/large")
    assert (small.engine.max_model_len, large.engine.max_model_len) == (4000, None)
    assert (small.engine.max_num_seqs, large.engine.max_num_seqs) == (8, 8)  # of the line, for all
    assert (small.chat.tool_call_parser, large.chat.tool_call_parser) == ("hermes", None)
    assert (small.processes.idle_sleep_s, small.processes.idle_sleep_level) == (600.0, 2)
    assert large.processes.idle_sleep_s is None
    assert [model.entry.memory_bytes for model in models] == [3 << 29, 16 << 30]
    assert {found.http.port, small.http.port, large.http.port} == {9000}
    assert small.models is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["'memory' is missing", "'models' is missing"]),
        ("memory: 2G\nmodels: {}", ["models: it must map names to models, 1 to 64 of them"]),
        ("memory: lots\nmodels:\n" + ONE, ["memory: 'lots' is not a size such as 512M or 24G"]),
        (GOOD + "modles: 1", ["unknown key 'modles'; did you mean 'models'?"]),
        (GOOD + "x: 1", ["unknown key 'x'; there are memory, loads_per_minute, load_timeout, models"]),
        (GOOD + "  two: {model: /m}\n", ["two: 'memory' is missing"]),
        (GOOD + "  two: {memory: 1G}\n", ["two: 'model' is missing"]),
        (GOOD + "  two: /m\n", ["two: it must map keys to values"]),
        (GOOD + "  two: {model: /m, memory: 3G}\n", ["two: its memory of 3072 MiB never fits into 2048 MiB"]),
        (GOOD + "  two: {model: /m, memory: 1G, sleep_level: 3}\n", ["two: sleep_level: it must be an integer from 1"]),
        (GOOD + "  two: {model: /m, memory: 1G, idle_sleep: soon}\n", ["two: idle_sleep: 'soon' is not a time"]),
        (GOOD + "  two: {model: /m, memory: 1G, idle_sleep: 0.1}\n", ["two: idle_sleep: it must be at least 1s"]),
        (GOOD + "  two: {model: /m, memory: 1G, aliases: [one]}\n", ["one: another model has this name"]),
        (GOOD + "  yes: {model: /m, memory: 1G}\n", ["models: a name has to be in quotes"]),
        (GOOD + "  two: {model: /m, memory: 1G, aliases: [3, null]}\n", ["two: aliases: it must be a list of"]),
        (GOOD + "  two: {model: /m, memory: 1G, idle_sleep: 5s, idle-sleep: 9s}\n", ["two: a key is set twice"]),
        (GOOD.replace("2G", "[2G]"), ["memory: it must be one value"]),
        (GOOD + "  two: {model: /m, memory: 1G, idle_sleep: [5s]}\n", ["two: idle_sleep: it must be one value"]),
        (GOOD + "  'a b': {model: /m, memory: 1G}\n", ["'a b' is no name"]),
        (GOOD + ONE, ["'one' is set twice"]),
        (GOOD + "  two: !!python/object/apply:os.system ['x']\n", ["it is not valid YAML"]),
        (GOOD + "  two: {model: /m, memory: 1G, flags: {port: 1}}\n", ["two:", "unknown key 'port'"]),
        (GOOD + "  two: {model: /m, memory: 1G, flags: {max_num_seqs: 0}}\n", ["two: max-num-seqs: must be"]),
        (GOOD + "  two: {model: /m, memory: 1G, flags: {trace: true}}\n", ["two: trace: its lines name one model"]),
        (
            GOOD + "  two: {model: /m, memory: 1G, flags: {enable_lora: true, lora_modules: [one=/a, x=/b]}}\n"
            "  three: {model: /m, memory: 1G, flags: {enable_lora: true, lora_modules: x=/c}}\n",
            [
                "two: the name of its adapter one is that of one",
                "three: the name of its adapter x is that of an adapter of two",
            ],
        ),
        (
            GOOD + "  two: {model: /m, memory: 1G, flags: {max-model-len: 1, max_model_len: 2}}\n",
            ["two: an option is set twice, under two spellings"],
        ),
    ],
)
def test_a_file_at_fault_is_refused_with_a_sentence_for_each_reason(tmp_path: Path, text: str, said: list[str]):
    path = write(tmp_path, text)
    found = problems("--models", path)
    for sentence in said:
        assert sentence in found
    assert all(line.startswith(f"--models {path}: ") for line in found.splitlines())


def test_only_its_owner_may_write_the_file(tmp_path: Path):
    path = write(tmp_path, GOOD)
    assert len(read_models_file(path).models) == 1
    for mode in (0o620, 0o602):
        Path(path).chmod(mode)
        with pytest.raises(ValueError, match="a group or others may write it"):
            read_models_file(path)
    with pytest.raises(ValueError, match="No such file"):
        read_models_file(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="directory"):
        read_models_file(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        (["/m/one"], "--model"),
        (["--served-model-name", "x"], "--served-model-name"),
        (["--max-file-bytes", "1G"], "--max-file-bytes"),
        (["--api-server-count", "2"], "--api-server-count"),
        (["--reload-models", "a=/b"], "--reload-models"),
        (["--lora-modules", "a=/b"], "--lora-modules"),
        (["--default-mm-loras", '{"audio": "/a"}'], "--default-mm-loras"),
        (["--engine-address", "ipc:///a"], "--engine-address"),
        (["--headless"], "--headless"),
        (["--idle-sleep", "10m"], "--idle-sleep"),
        (["--record-steps", "/log"], "--record-steps"),
        (["--kv-cache-memory-bytes", "1G"], "--kv-cache-memory-bytes"),
        (["--enable-sleep-mode"], "--enable-sleep-mode"),
    ],
)
def test_what_cannot_work_with_several_models_is_refused_by_name(tmp_path: Path, line: list[str], flag: str):
    found = problems("--models", write(tmp_path, GOOD), *line)
    assert f"--models and {flag} exclude each other: " in found


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "kv_cache_dir: {0}/a",
            "kv_cache_dir: {0}/b/../a",
            "two: its kv_cache_dir {0}/b/../a is the kv_cache_dir of one",
        ),
        (
            "record_steps: {0}/a",
            "record_steps: {0}/link/a",
            "two: its record_steps {0}/link/a is the record_steps of one",
        ),
        ("record_steps: {0}/a", "kv_cache_dir: {0}/a", "two: its kv_cache_dir {0}/a is the record_steps of one"),
        ("kv_cache_dir: {0}/a.1", "kv_cache_dir: {0}/a, data_parallel_size: 2", "two: its kv_cache_dir {0}/a.1 is the"),
        ("kv_cache_dir: {0}/a", "kv_cache_dir: {0}/b, record_steps: {0}/a.steps", ""),
    ],
)
def test_two_models_do_not_write_one_file(tmp_path: Path, first: str, second: str, said: str):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "b").mkdir()
    flags = [one.format(tmp_path) for one in (first, second)]
    text = f"memory: 8G\nmodels:\n  one: {{model: /m/one, memory: 1G, flags: {{{flags[0]}}}}}\n"
    path = write(tmp_path, text + f"  two: {{model: /m/two, memory: 1G, flags: {{{flags[1]}}}}}\n")
    if said:
        assert said.format(tmp_path) in problems("--models", path)
    else:
        assert config("--models", path).models is not None


def test_a_line_of_a_file_of_keys_limits_its_key_to_models(tmp_path: Path):
    path, keys = write(tmp_path, GOOD + "  two: {model: /m/two, memory: 1G}\n"), tmp_path / "keys"
    keys.write_text("all-of-them\nlimited models=one\n  both \t models=one,two\n")
    http = config("--models", path, "--api-key-file", str(keys)).http
    assert [http.key_to_models.get(key) for key in http.api_keys] == [None, {"one"}, {"one", "two"}]
    assert all(
        key.matches(text) for key, text in zip(http.api_keys, (b"all-of-them", b"limited", b"both"), strict=True)
    )
    keys.write_text("limited models=one,three\n")
    assert "a key has 'models=three', which is no first name of a model" in problems(
        "--models", path, "--api-key-file", str(keys)
    )
    for line in ("limited models=one, two\n", "limited models=one models=two\n", "a models=one\na models=two\n"):
        keys.write_text(line)
        assert "a key has one 'models='" in problems("--models", path, "--api-key-file", str(keys))
    assert "needs --models" in problems("/m", "--api-key-file", str(keys))


def test_the_example_of_the_page_is_such_a_file(tmp_path: Path):
    page = (Path(__file__).resolve().parents[4] / "docs" / "several-models.md").read_text(encoding="utf-8")
    example = page.split("```yaml\n", 1)[1].split("```", 1)[0]
    models = models_of(config("--models", write(tmp_path, example)))
    assert models.names == ("small", "gpt-4o-mini", "large")
    assert models.models[1].config.engine.max_model_len == 32_000
    refused = page.split("refused at the start, by name:", 1)[1].split("There are no", 1)[0]
    for flag in ("--max-file-bytes", "--default-mm-loras", "--api-server-count", "--trace", "--swap-space"):
        assert flag in refused


def test_each_model_has_its_folder_and_its_part_of_the_bytes_on_disk(tmp_path: Path):
    path = write(
        tmp_path,
        GOOD + "  a/two: {model: /m, memory: 1G, flags: {kv_cache_disk_bytes: 3M}}\n"
        f"  three: {{model: /m, memory: 1G, flags: {{kv_cache_dir: {tmp_path}/own}}}}\n",
    )
    line = ["--kv-cache-dir", f"{tmp_path}/cache/", "--kv-cache-disk-bytes", "9M"]
    engines = [model.config.engine for model in models_of(config("--models", path, *line)).models]
    folders = [engine.kv_cache_dir for engine in engines]
    assert str(folders[0]).startswith(f"{tmp_path}/cache.one.")
    assert str(folders[1]).startswith(f"{tmp_path}/cache.a%2Ftwo.")
    assert folders[2] == f"{tmp_path}/own"
    assert [engine.kv_cache_disk_bytes for engine in engines] == [3 << 20, 3 << 20, 9 << 20]
