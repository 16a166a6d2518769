"""Other machines of an endpoint, for the supervisor of its API processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmstack_engine_core.client.hosts import HostsLauncher, make_launcher
from llmstack_engine_core.hosts.relay import MembershipFeed
from llmstack_engine_core.hosts.rendezvous import Rendezvous
from llmstack_llm.model.preflight import check_model_runs
from llmstack_types import EngineStartError

if TYPE_CHECKING:
    from llmstack_llm import EngineArgs


@dataclass(slots=True)
class Members:
    """The listener for other machines, and the launcher of their engine cores.

    Attributes:
        feed: Tells the API processes.
        launcher: None where the operators of the machines start them.
    """

    feed: MembershipFeed
    launcher: HostsLauncher | None

    async def close(self) -> None:
        """Tells the machines that the endpoint ends, and ends what was started there. Idempotent."""
        await self.feed.close()
        launcher, self.launcher = self.launcher, None
        if launcher is not None:
            await asyncio.to_thread(launcher.close)


def open_members(arguments: EngineArgs) -> Members:
    """Listens for the other machines, before anything is started here.

    Raises:
        LLMStackError, OSError: The options or the model are unusable, or the address cannot be listened on.
    """
    _, config = arguments.create_engine_config()
    if config.hosts is None:
        raise EngineStartError("there are no other machines")
    check_model_runs(config)
    feed = MembershipFeed(Rendezvous(config.hosts, config.key_file, config.hosts.num_local))
    return Members(feed, make_launcher(config, config.hosts))
