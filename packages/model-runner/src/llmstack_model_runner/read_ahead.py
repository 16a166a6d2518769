"""Reading of a model's files while the process that loads them imports torch."""

from __future__ import annotations

import threading
from pathlib import Path

from llmstack_model_files import gguf_weights, read_ahead, safetensors_files
from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_model_runner.packed_files import SHARE_OF_MEMORY, packed_before
from llmstack_types import ModelRunnerConfig


def start_reading(config: ModelRunnerConfig) -> None:
    """Starts threads that read what the load will need, as far as it fits a quarter of the free memory.

    Errors are left to the load, which names them.
    """
    if config.load_format != "dummy":
        threading.Thread(target=_read, args=(config,), name="read-ahead", daemon=True).start()


def _read(config: ModelRunnerConfig) -> None:
    try:
        room = (available_memory_bytes() or 0) // SHARE_OF_MEMORY
        read_ahead(weight_files(config), room)
    except Exception:  # noqa: BLE001, S110 - whatever is wrong with the model, its load says so in a sentence
        pass


def weight_files(config: ModelRunnerConfig) -> list[Path]:
    """The files that a load reads most of: packed weights that were used last, a file per rank, or the checkpoint's.

    Raises:
        llmstack_model_files.ModelFilesError: There are no weights.
    """
    folder = Path(config.model_path)
    packed = packed_before(folder) if config.pack_cache else []
    return packed[: config.num_local_ranks] or list(gguf_weights(folder)) or safetensors_files(folder)
