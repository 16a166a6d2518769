"""Memory for weights that is touched before a model is loaded: as much as they will take, where that is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmstack_kernels.memory_regions import REGION_BYTES, MemoryRegions
from llmstack_model_files import ModelFilesError
from llmstack_model_runner import touch_ahead
from llmstack_model_runner.packed_files import cache_folder, files_digest
from llmstack_model_runner.touch_ahead import start_touching, table_bytes, weight_bytes
from llmstack_types import ModelRunnerConfig


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmstack_kernels.memory_regions.LEAST_S_PER_BYTE", 0.0)
    monkeypatch.setattr(touch_ahead, "num_usable_cpus", lambda root: 2)


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> MemoryRegions:
    found = MemoryRegions()
    monkeypatch.setattr(touch_ahead, "REGIONS", found)
    return found


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight = {"dtype": "BF16", "shape": [1 << 13, 1 << 13], "data_offsets": [0, 2 * REGION_BYTES]}
    header = json.dumps({"weight": weight}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * REGION_BYTES)
    return folder


def memory(root: Path, kib: int = 1 << 24, *devices: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {kib} kB\n")
    for device in devices:
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev" / device).touch()
    return root


@pytest.mark.parametrize(
    ("changes", "num_regions"),
    [
        ({}, 2),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": "float32"}, 4),
        ({"quantization": "int4"}, 0.5),
        ({"tensor_parallel_size": 2}, 0),
        ({"draft_model_path": "draft"}, 0),
        ({"load_format": "dummy"}, 0),
        ({"device": "cuda"}, 0),
    ],
)
def test_weights_take_what_their_headers_say(model: Path, changes: dict[str, object], num_regions: float) -> None:
    config = ModelRunnerConfig(str(model), **{"device": "cpu", **changes})  # type: ignore[arg-type]
    assert weight_bytes(config) == num_regions * REGION_BYTES


def test_packed_weights_take_the_bytes_of_their_file(model: Path) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / f"{files_digest(model)}-a.packed").write_bytes(b"packed")
    config = ModelRunnerConfig(str(model), quantization="int4", device="cpu", pack_cache=True)
    assert weight_bytes(config) == len(b"packed")


def test_one_processor_gains_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_ahead, "num_usable_cpus", lambda root: 1)
    assert weight_bytes(ModelRunnerConfig(str(model), device="cpu")) == 0


@pytest.mark.parametrize(("devices", "is_touched"), [((), True), (("nvidiactl",), False), (("kfd",), False)])
def test_weights_that_may_go_to_a_gpu_take_no_memory_here(
    model: Path, tmp_path: Path, devices: tuple[str, ...], is_touched: bool
) -> None:
    root = memory(tmp_path / "root", 1 << 24, *devices)
    assert bool(weight_bytes(ModelRunnerConfig(str(model)), root)) == is_touched


@pytest.mark.parametrize(("share", "num_regions"), [(8, 2), (4, 1), (3, 0)])
def test_a_quarter_of_the_free_memory_is_touched_at_most(
    model: Path, tmp_path: Path, regions: MemoryRegions, share: int, num_regions: int
) -> None:
    root = memory(tmp_path / "root", share * REGION_BYTES >> 10)
    start_touching(ModelRunnerConfig(str(model), device="cpu"), root).join()
    assert len(regions._touched) == num_regions


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 2), ("bfloat16", 2), ("float", 4)])
def test_the_table_of_tokens_of_a_gguf_file_is_widened(tmp_path: Path, dtype: str, num_bytes: int) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "hidden_size": 64, "dtype": "bfloat16"}')
    config = ModelRunnerConfig(str(tmp_path), dtype=dtype)  # type: ignore[arg-type]  # a name of it
    assert table_bytes(config) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(touch_ahead, "gguf_weights", lambda folder: [folder / "model.gguf"])
        assert table_bytes(config) == 64_000 * num_bytes


def test_a_model_without_weights_is_left_to_the_load(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError):
        weight_bytes(ModelRunnerConfig(str(model), device="cpu"))
    start_touching(ModelRunnerConfig(str(model), device="cpu")).join()  # whose thread raises nothing


def test_nothing_is_touched_when_the_load_has_ended(model: Path, regions: MemoryRegions) -> None:
    regions.end_touching()
    start_touching(ModelRunnerConfig(str(model), device="cpu")).join()
    assert not regions._touched


def test_it_needs_no_torch() -> None:
    code = "import sys, llmstack_model_runner.touch_ahead; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
