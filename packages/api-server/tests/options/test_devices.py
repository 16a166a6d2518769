"""What a message says of the machine's devices, out of the files of its system."""

from __future__ import annotations

import os
from pathlib import Path

from llmstack_server.options.devices import describe_devices, find_gpus


def add_gpu(root: Path, address: str, information: str | None) -> None:
    folder = root / "proc/driver/nvidia/gpus" / address
    folder.mkdir(parents=True)
    if information is not None:
        (folder / "information").write_text(information)


def test_gpus_are_named_as_the_driver_names_them(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0000:01:00.0", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 7\n")
    assert describe_devices(tmp_path) == "1 GPU: NVIDIA H200"
    add_gpu(tmp_path, "0000:02:00.0", "IRQ: 8\n")
    add_gpu(tmp_path, "0000:03:00.0", None)
    assert describe_devices(tmp_path) == "3 GPUs: NVIDIA H200, 0000:02:00.0, 0000:03:00.0"


def test_device_files_do_where_the_driver_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert find_gpus(tmp_path) == ["/dev/nvidia0", "/dev/nvidia1"]


def test_a_machine_without_a_gpu_is_described_by_its_processors(tmp_path: Path) -> None:
    assert describe_devices(tmp_path) == f"no GPU, {os.cpu_count()} processors"
