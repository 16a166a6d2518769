"""First touch of the memory for weights, beside the import of torch."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

from llmstack_kernels.memory_regions import REGIONS
from llmstack_kernels.usable_cpus import num_usable_cpus
from llmstack_model_files import gguf_weights, read_model_config
from llmstack_model_runner.declared_sizes import first_int, text_fields
from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_model_runner.packed_files import SHARE_OF_MEMORY, SUFFIX
from llmstack_model_runner.preflight import least_weight_bytes
from llmstack_model_runner.read_ahead import weight_files
from llmstack_types import ModelRunnerConfig
from llmstack_types.vocabulary import DTYPE_ALIASES


def start_touching(config: ModelRunnerConfig, root: Path = Path("/")) -> threading.Thread:
    """Starts a thread that touches what the weights will take, as far as it fits a quarter of the free memory.

    Errors are left to the load, which names them. `root`: Where `proc`, `sys` and `dev` are found.
    """
    thread = threading.Thread(target=_touch, args=(config, root), name="touch-ahead", daemon=True)
    thread.start()
    return thread


def _touch(config: ModelRunnerConfig, root: Path) -> None:
    try:
        room = (available_memory_bytes(root) or 0) // SHARE_OF_MEMORY
        num_bytes, table = weight_bytes(config, root), table_bytes(config)
        if table < room:
            REGIONS.touch_ahead(min(num_bytes, room - table), table)
    except Exception:  # noqa: BLE001, S110 - whatever is wrong with the model, its load says so in a sentence
        pass


def weight_bytes(config: ModelRunnerConfig, root: Path = Path("/")) -> int:
    """A lower bound of what the weights will take here; 0 where nothing is gained.

    Raises:
        llmstack_model_files.ModelFilesError: There are no weights, or a file is damaged.
    """
    if not _runs_here(config, root) or num_usable_cpus(root) == 1:
        return 0
    files = weight_files(config)
    is_packed = all(file.suffix == SUFFIX for file in files)
    return sum(file.stat().st_size for file in files) if is_packed else least_weight_bytes(config)


def table_bytes(config: ModelRunnerConfig) -> int:
    """Bytes of a GGUF file's table of tokens, which is widened to the model's type; 0 for other files.

    Raises:
        llmstack_model_files.ModelFilesError: A file of the model is missing or damaged.
    """
    folder = Path(config.model_path)
    if not gguf_weights(folder):
        return 0
    found = read_model_config(folder, {})
    text, dtype = text_fields(found), config.dtype if config.dtype != "auto" else str(found.get("dtype"))
    num_bytes = 4 if DTYPE_ALIASES.get(dtype, dtype) == "float32" else 2
    return first_int(text, "vocab_size") * first_int(text, "hidden_size", "n_embd") * num_bytes


def _runs_here(config: ModelRunnerConfig, root: Path) -> bool:
    """Whether this process has all weights, in memory of the system."""
    has_gpu = any((root / "dev" / name).exists() for name in ("nvidiactl", "kfd"))
    is_on_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpu)
    has_regions = hasattr(mmap, "MADV_HUGEPAGE")
    is_alone = config.num_ranks == 1 and not config.draft_model_path  # what a draft model's load has left is freed
    return is_on_cpu and has_regions and is_alone and config.load_format != "dummy"
