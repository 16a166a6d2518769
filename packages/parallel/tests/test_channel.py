"""Channels between ranks: what a sender learns of a rank that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from llmstack_parallel.channel import local_channel
from llmstack_parallel.errors import LostRankError


def test_a_frame_for_a_rank_that_is_not_there_is_a_lost_rank(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = local_channel(context, f"ipc://{tmp_path}/rank", binds=True)
    try:
        with pytest.raises(LostRankError, match="takes no message"):
            channel.send(b"step")
    finally:
        channel.close()
        context.term()
