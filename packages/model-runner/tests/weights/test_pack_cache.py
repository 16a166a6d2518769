"""Packed weights in files: found again bit by bit, and only where nothing they depend on has changed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_kernels.linear import QUANTIZATIONS, PackedLinear, PackedWeight, native, packing_version
from llmstack_kernels.linear.native_layer import NativeLinear
from llmstack_model_runner.checkpoint_formats.config import choose_quantization
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.testing import write_gpt2_checkpoint, write_random_weights
from llmstack_model_runner.weights.load import load_weights
from llmstack_model_runner.weights.pack_cache import kept_weights, make_own_folder, make_room
from llmstack_model_runner.weights.pack_file import check_part, write_file
from llmstack_types import ModelRunnerConfig

pytestmark = pytest.mark.skipif(not packing_version("cpu"), reason="only native kernels have packed weights to keep")

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 97,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = [1, 5, 8, 13, 40, 2]
MODULE = "llmstack_model_runner.weights.pack_cache"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which keeps the smallest model too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(f"{MODULE}.MIN_BYTES", 1)
    monkeypatch.setattr(f"{MODULE}.WRITE_DELAY_S", 0.0)
    return tmp_path / "cache" / "llmstack" / "packed"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    return write_gpt2_checkpoint(model)


def load(model: Path, at_end: Callable[[], object] = lambda: None, **options: object) -> tuple[bool, list[int]]:
    """Whether packed weights were found, and what the model then continues a prompt with."""
    config = ModelRunnerConfig(str(model), pack_cache=True, **options)  # type: ignore[arg-type]  # test values
    values = json.loads((model / "config.json").read_text()) | json.loads(config.hf_overrides or "{}")
    made = load_model_class(values["architectures"][0])(values, torch.float32, CPU)
    with kept_weights(config, values, torch.float32, CPU, Sharding()) as packed:
        is_hit = packed is not None and packed.is_hit
        checkpoint_format, scheme = choose_quantization(values, config.quantization)
        load_weights(made, model, quantization=scheme, checkpoint_format=checkpoint_format, packed=packed)
        at_end()
    for thread in threading.enumerate():
        if thread.name == "pack-cache":
            thread.join()
    return is_hit, PagedHarness(made, torch.float32).greedy(PROMPT, 12)  # type: ignore[arg-type]  # both generate


def refuse_to_pack(*_: object) -> PackedLinear:
    raise AssertionError("packed")


@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS, "int8_dynamic"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_second_start_packs_nothing_and_computes_the_same(
    folder: Path, gpt2: Path, family: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "llama":
        (gpt2 / "config.json").write_text(json.dumps(LLAMA))
        write_random_weights(gpt2)
    was_hit, first = load(gpt2, quantization=scheme)
    for owner, name in ((NativeLinear, "pack"), (NativeLinear, "pack_dynamic"), (native, "pack_stored")):
        monkeypatch.setattr(owner, name, refuse_to_pack)
    is_hit, second = load(gpt2, quantization=scheme)
    assert (was_hit, is_hit) == (False, True)
    assert second == first
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_tied_table_is_read_beside_kept_weights_where_no_kernel_looks_up_in_them(
    folder: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = load(gpt2)
    for module in ("llmstack_kernels.embedding", "llmstack_model_runner.layers.embedding"):
        monkeypatch.setattr(f"{module}.can_look_up_packed", lambda: False)
    assert load(gpt2) == (True, first)
    assert list(folder.iterdir())


@pytest.mark.parametrize("change", ["weights", "copy", "kernels", "readers", "quantization", "config"])
def test_packed_weights_are_not_used_where_what_they_depend_on_has_changed(
    folder: Path, gpt2: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(gpt2)
    options: dict[str, object] = {}
    weights = gpt2 / "model.safetensors"
    if change == "weights":
        os.utime(weights, ns=(0, 0))
    elif change == "copy":
        status, content = weights.stat(), weights.read_bytes()
        weights.rename(gpt2 / "before")  # so that the inode is in use
        weights.write_bytes(content)
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "kernels":
        monkeypatch.setattr(f"{MODULE}.packing_version", lambda device: "other")
    elif change == "readers":
        monkeypatch.setattr(f"{MODULE}.code_digest", lambda: "other")
    elif change == "quantization":
        options["quantization"] = "int8"
    else:
        options["hf_overrides"] = '{"layer_norm_epsilon": 0.1}'
    assert load(gpt2, **options)[0] is False
    assert len([*folder.iterdir()]) == 2


def test_weights_that_change_while_they_are_loaded_are_not_kept(folder: Path, gpt2: Path) -> None:
    load(gpt2, at_end=lambda: os.utime(gpt2 / "model.safetensors", ns=(0, 0)))
    assert not folder.exists()


def test_models_that_pack_in_a_moment_are_not_kept(folder: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.MIN_BYTES", 1 << 20)
    load(gpt2)
    assert not folder.exists()


@pytest.mark.parametrize("options", [{"pack_cache": False}, {"load_format": "dummy"}])
def test_there_is_no_cache_where_it_is_off_or_weights_are_made_up(gpt2: Path, options: dict[str, object]):
    config = ModelRunnerConfig(str(gpt2), **{"pack_cache": True, **options})  # type: ignore[arg-type]  # test values
    with kept_weights(config, {}, torch.float32, CPU, Sharding()) as packed:
        assert packed is None


@pytest.mark.parametrize("mode", ["0o755", "0o770", "link"])
def test_a_folder_that_others_may_enter_is_neither_read_nor_written(
    folder: Path, gpt2: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(gpt2)
    if mode == "link":
        folder.rename(folder.with_name("moved"))
        folder.symlink_to(folder.with_name("moved"))
    else:
        folder.chmod(int(mode, 8))
    os.utime(gpt2 / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load(gpt2)[0] is False
    assert "is no folder that only this user may enter" in caplog.text
    assert len([*folder.iterdir()]) == 1


def damaged(content: bytes, how: str) -> bytes:
    """The content of a file with one mistake."""
    if how == "short":
        return content[:-1]
    if how == "format":
        return b"LLMSPK00" + content[8:]
    if how == "long header":
        return content[:8] + b"\xff" * 8 + content[16:]
    if how == "empty":
        return b""
    start, end = content.index(b'"offset": ') + 10, content.index(b"}", content.index(b'"offset": '))
    return content[:start] + b"9" * (end - start) + content[end:]


@pytest.mark.parametrize("how", ["short", "format", "long header", "empty", "offset"])
def test_a_damaged_file_is_packed_again(folder: Path, gpt2: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    _, first = load(gpt2)
    (file,) = folder.iterdir()
    file.write_bytes(damaged(file.read_bytes(), how))
    with caplog.at_level(logging.WARNING):
        assert load(gpt2) == (False, first)
    assert "are not used" in caplog.text
    assert load(gpt2) == (True, first)


def test_a_file_that_becomes_shorter_while_it_is_read_is_removed(folder: Path, gpt2: Path) -> None:
    load(gpt2)
    (file,) = folder.iterdir()
    config = ModelRunnerConfig(str(gpt2), pack_cache=True)
    values = json.loads((gpt2 / "config.json").read_text())
    with kept_weights(config, values, torch.float32, CPU, Sharding()) as packed:
        assert packed is not None
        os.truncate(file, 100)
        with pytest.raises(ValueError, match="cannot be read"):
            packed.read("transformer.h.0.attn.c_attn")
    assert not file.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1]},
        {"dtype": "object"},
        {"group_size": "1"},
        {"has_order": 1},
        {"offset": -1},
        {"offset": 97},
        {"tensor": [-1]},
    ],
)
def test_a_layer_that_is_described_wrongly_is_refused(change: dict[str, object]) -> None:
    tensor = {"shape": change.get("tensor", [1]), "dtype": "float32", "offset": change.get("offset", 96)}
    part = {"shape": [1, 1], "dtype": "float32", "scheme": "", "group_size": 0, "has_order": False, "tensors": [tensor]}
    if change.keys() <= part.keys():
        part |= change
    with pytest.raises(ValueError):
        check_part(part, 100)


def weight(num_bytes: int) -> dict[str, tuple[PackedWeight, ...]]:
    return {"layer": (PackedWeight((1, 1), torch.float32, "", 0, (torch.zeros(num_bytes, dtype=torch.uint8),)),)}


def test_what_was_used_least_recently_makes_room_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packed"
    make_own_folder(folder)
    paths = [folder / f"{name}.packed" for name in "abc"]
    for index, path in enumerate(paths):
        write_file(path, weight(1000))
        os.utime(path, (1e9 + index, 1e9 + index))
    os.utime(paths[0], (2e9, 2e9))  # it is used again
    leftover = folder / ".d.packed"
    leftover.write_bytes(b"x")
    os.utime(leftover, (1e9, 1e9))
    size = paths[0].stat().st_size
    monkeypatch.setattr(f"{MODULE}.MAX_CACHE_BYTES", 3 * size)
    make_room(folder, 2 * size)
    assert [*folder.iterdir()] == [paths[0]]
    make_room(folder, 2 * size)
    assert [*folder.iterdir()] == [paths[0]]


def test_a_tensor_of_another_type_is_not_written(tmp_path: Path) -> None:
    kept = {"layer": (PackedWeight((1, 1), torch.float32, "", 0, (torch.zeros(1, dtype=torch.float64),)),)}
    with pytest.raises(ValueError, match=r"^layer has a tensor of torch\.float64$"):
        write_file(tmp_path / "a.packed", kept)
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    target = tmp_path / "a.packed"
    with open(tmp_path / ".a.packed", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            write_file(target, weight(10))
    write_file(target, weight(10))  # it has ended without being finished
    assert [*tmp_path.iterdir()] == [target]


def test_a_disk_with_little_room_keeps_nothing(
    folder: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"{MODULE}.MIN_FREE_BYTES", 1 << 62)
    with caplog.at_level(logging.INFO):
        load(gpt2)
    assert [*folder.iterdir()] == []
    assert "bytes free" in caplog.text


def test_a_user_without_a_home_has_no_cache(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert load(gpt2)[0] is False
    assert not Path("relative").exists()
