"""Opens the prefix cache on disk of one engine core."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Final, cast

from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.disk_cache.block_files import LOCK_FILE, BlockFiles
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_engine_core.private_folder import PrivateFolderError, lock, open_folder, read_or_make_secret
from llmstack_engine_core.protocols import ModelRunner, TransferRunner
from llmstack_engine_core.stages import PrefixStage
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineReady, EngineStartError, KVCacheSpec

logger = logging.getLogger(__name__)

SECRET_SUFFIX: Final = ".secret"  # noqa: S105 (the end of a file's name)
_LOCK_WAIT_S: Final = 10.0
"""How long the process that this one replaces may take to end."""


def make_stored_prefixes(
    config: EngineConfig, scheduler: Scheduler, runner: ModelRunner, spec: KVCacheSpec, ready: EngineReady
) -> PrefixStage:
    """The stage of prefixes on disk, as configured.

    Raises:
        EngineStartError: The folder, this model or this system does not allow it.
    """
    if config.kv_cache_dir is None:
        return PrefixStage()
    name = f"--kv-cache-dir {config.kv_cache_dir}"
    if not spec.is_causal:  # one of several models, perhaps: as in memory, its prefixes are of no use
        logger.warning("%s: the model is not causal, so that nothing is kept", name)
        return PrefixStage()
    if not hasattr(runner, "read_kv_blocks"):
        raise EngineStartError(f"{name}: the model runner does not hand out KV blocks")
    try:
        from llmstack_engine_core.disk_cache.file_groups import FileGroups
        from llmstack_engine_core.disk_cache.prefix_store import PrefixStore
        from llmstack_engine_core.disk_cache.prefix_writes import Cache
        from llmstack_engine_core.disk_cache.stored_prefixes import StoredPrefixes
    except ModuleNotFoundError as error:
        raise EngineStartError(f"{name} needs {error.name}: install llmstack-server[disk]") from None
    carrying = cast(TransferRunner, runner)
    files, secret = open_files(name, os.path.abspath(config.kv_cache_dir), config.kv_cache_disk_bytes)
    groups = FileGroups.of([group.sliding_window for group in spec.table_groups] or [None])
    store = PrefixStore(files, secret, TagMaker(ready, *carrying.kv_block_form()), groups)
    logger.info("KV cache on disk: %d files, %d of at most %d bytes in %s",
                len(files), files.num_bytes, config.kv_cache_disk_bytes, config.kv_cache_dir)  # fmt: skip
    return StoredPrefixes(Cache(scheduler, carrying, ready.block_size, groups.num_groups), store)


def open_files(name: str, path: str, max_bytes: int) -> tuple[BlockFiles, bytes]:
    """The files in the folder, which this process then holds, and the secret beside it.

    Raises:
        EngineStartError: The folder is not ours alone, or another process uses it.
    """
    parent, base = os.path.split(path)
    with ExitStack() as stack:
        try:
            folder = open_folder(name, path)
            stack.callback(os.close, folder)
            held = lock(name, folder, LOCK_FILE, wait_s=_LOCK_WAIT_S)
            stack.callback(os.close, held)
            beside = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                secret = read_or_make_secret(name, beside, base + SECRET_SUFFIX)
            finally:
                os.close(beside)
            files = BlockFiles(folder, held, max_bytes)
        except PrivateFolderError as error:
            raise EngineStartError(str(error)) from None
        except OSError as error:
            raise EngineStartError(f"{name} cannot be used: {error.strerror}") from None
        stack.pop_all()
    return files, secret
