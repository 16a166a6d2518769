"""Chooses what carries KV blocks to other engine cores."""

from __future__ import annotations

import logging
from typing import cast

from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferNetwork
from llmstack_engine_core.kv_transfer.request_transfers import TransferParts
from llmstack_engine_core.kv_transfer.sealed_memory import is_available
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_engine_core.protocols import KVTransfer, ModelRunner, TransferRunner
from llmstack_types import EngineReady, EngineStartError, KVCacheSpec

logger = logging.getLogger(__name__)


def make_transfer(
    config: KVTransferConfig,
    network: TransferNetwork | None,
    runner: ModelRunner,
    spec: KVCacheSpec,
    ready: EngineReady,
) -> TransferParts:
    """The connector that exchanges KV blocks with other engine cores.

    Raises:
        EngineStartError: This model, model runner or system cannot do it.
    """
    for is_possible, reason in (
        (is_available(), "this system has no sealed memory files"),
        (hasattr(runner, "read_kv_blocks"), "the model runner does not hand out KV blocks"),
        (not spec.table_groups, "layers with sliding windows have block tables of their own"),
        (spec.is_causal, "the model is not causal, so that no prefix is ever found"),
    ):
        if not is_possible:
            raise EngineStartError(f"--kv-transfer-config: {reason}")
    transfer = _connector(config, network)
    logger.info("KV transfer: %s as engine %s", config.kv_role, transfer.engine_id)
    carrying = cast(TransferRunner, runner)
    return TransferParts(config, transfer, carrying, TagMaker(ready, *carrying.kv_block_form()))


def _connector(config: KVTransferConfig, network: TransferNetwork | None) -> KVTransfer:
    # Late: most servers need neither.
    if network is not None and config.is_between_hosts:
        from llmstack_engine_core.kv_transfer.nixl import NixlTransfer

        return NixlTransfer(config, network)
    from llmstack_engine_core.kv_transfer.shared_memory import SharedMemoryTransfer

    return SharedMemoryTransfer(config)
