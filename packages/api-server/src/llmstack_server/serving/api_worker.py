"""The program of one of several API processes, which `api_servers` starts."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_llm.options.resolve import Settings
from llmstack_server.observability.logs import set_up_logging
from llmstack_server.options.command_line import SERVE_OPTIONS
from llmstack_server.options.config import ServeConfig, config_from
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.serving import process_channel
from llmstack_server.serving.api_process import ApiProcess
from llmstack_server.serving.event_loop import EarlySignals, loop_factory
from llmstack_server.serving.launcher import StageTimer, start_engine
from llmstack_server.serving.ready_panel import ready_summary
from llmstack_server.state.peers import Peers

if TYPE_CHECKING:
    from llmstack_engine_client.hosts.relay import RelayedMembers
    from llmstack_llm import AsyncLLM, StatLogger
    from llmstack_server.serving.reload_follower import ReloadFollower
    from llmstack_server.state.lifecycle import Lifecycle
    from llmstack_server.state.server_state import ServerState

logger = logging.getLogger("llmstack_server.serving.api_worker")  # `__name__` is `__main__` here

# Time for a process to end by itself after its parent has ended.
ORPHAN_GRACE_S = 3.0


@dataclass(slots=True)
class Worker:
    """One API process, and its channel to the process that started it.

    Attributes:
        channel: Receives orders and sends events; it closes when the other process ends.
        is_replacement: Whether other processes answer already; then it accepts no connection before it is ready.
    """

    config: ServeConfig
    listener: socket.socket
    channel: socket.socket
    index: int
    count: int
    directory: Path
    is_replacement: bool
    timer: StageTimer = field(default_factory=StageTimer)
    signals: EarlySignals = field(init=False)
    _may_serve: asyncio.Event = field(default_factory=asyncio.Event)
    _is_orphan: bool = False
    _addresses: process_channel.Message = field(default_factory=dict)
    _engine: AsyncLLM | None = None
    _lifecycle: Lifecycle | None = None
    _follower: ReloadFollower | None = None
    _members: RelayedMembers | None = None
    _ended: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.signals = EarlySignals(stops_on_hangup=self.config.http.tls is None)
        if self.config.engine.has_other_hosts:
            from llmstack_engine_client.hosts.relay import RelayedMembers

            self._members = RelayedMembers(self._send_event)

    def run(self) -> int:
        """Serves until a signal (0) or the engine's death (1); a failed start is reported and returns 1."""
        with self.signals.installed(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                return runner.run(self._serve())
            except ServeError as error:
                self._send_event({"failed": str(error)})
                return 1
            finally:
                if self._is_orphan:
                    shutil.rmtree(self.directory, ignore_errors=True)

    async def _serve(self) -> int:
        open_engine = partial(self._open_engine, asyncio.get_running_loop())
        async with Peers(self.directory, self.index, self.count) as peers:
            process = ApiProcess(
                self.config, self.timer, self.listener, self.signals, open_engine, self._on_ready, peers,
                accepts_early=not self.is_replacement,
            )  # fmt: skip
            return await process.run()

    def _open_engine(
        self, loop: asyncio.AbstractEventLoop, timer: StageTimer, stat_loggers: Sequence[StatLogger]
    ) -> AsyncLLM:
        with timer.stage("wait for engine addresses"):
            order = process_channel.receive(self.channel)
        if order is None:
            self._is_orphan = True
            raise ServeError("the process that started this one has ended")
        self._ended = dict(order["ended"])
        threading.Thread(target=self._follow_parent, args=(loop,), name="lifeline", daemon=True).start()
        with timer.stage("attach to engine"):
            settings = self.config.reload.entries[order["reloaded"]["name"]].settings if self._can_reload else {}
            self._addresses = order
            self._engine = start_engine(
                replace(self.config.engine, **settings, model=order["model_path"]),
                stat_loggers,
                addresses=order["addresses"],
                client_index=self.index,
                members=self._members,
            )
            loop.call_soon_threadsafe(self._pass_on_ends)
            return self._engine

    @property
    def _can_reload(self) -> bool:
        return bool(self.config.reload.reload_models)

    async def _on_ready(self, state: ServerState, stages: dict[str, float]) -> None:
        """Waits until the engine is ready in all processes, and reports Ready once all accept requests."""
        if self._can_reload and self._engine is not None:
            from llmstack_server.serving.reload_follower import ReloadFollower

            self._follower = state.shared_reloads = ReloadFollower(state, self._engine, self._send_event)
            self._follower.begin(self._addresses["reloaded"], self._addresses["start_model_path"])
        self._send_event({"ready": True, "summary": list(ready_summary(state)), "stages": stages})
        self._lifecycle = state.lifecycle
        state.lifecycle.waits_for_others = not self.is_replacement
        await self._may_serve.wait()
        asyncio.get_running_loop().call_soon(self._send_event, {"serving": True})  # runs once requests are accepted

    def _note_end(self, engine_index: int, reason: str) -> None:
        self._ended[engine_index] = reason
        self._pass_on_ends()

    def _pass_on_ends(self) -> None:
        """Tells the engine, once there is one, which engine cores have ended for good."""
        if self._engine is not None:
            for engine_index, reason in self._ended.items():
                self._engine.note_engine_end(engine_index, reason)

    def _note_loss(self, order: process_channel.Message) -> None:
        if self._engine is not None:
            self._engine.note_engine_death(order["lost"], order["how"], is_outside=order["is_outside"])

    def _report_ready(self) -> None:
        if self._lifecycle is not None:
            self._lifecycle.waits_for_others = False

    def _send_event(self, event: process_channel.Message) -> None:
        with contextlib.suppress(OSError):  # the other process has ended
            process_channel.send(self.channel, event)

    def _follow_parent(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends this process with its parent; the engine cores end then, too."""
        with contextlib.suppress(process_channel.ChannelError, RuntimeError):  # an invalid message, or a closed loop
            while (order := process_channel.receive(self.channel)) is not None:
                if order.get("serve"):
                    loop.call_soon_threadsafe(self._may_serve.set)
                elif order.get("all_serve"):
                    loop.call_soon_threadsafe(self._report_ready)
                elif "reload" in order and self._follower is not None:
                    loop.call_soon_threadsafe(self._follower.take, order)
                elif "ended" in order:
                    loop.call_soon_threadsafe(self._note_end, order["ended"], order["reason"])
                elif "lost" in order:
                    loop.call_soon_threadsafe(self._note_loss, order)
                elif "members" in order and self._members is not None:
                    loop.call_soon_threadsafe(self._members.take, order)
        self._is_orphan = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)


def configuration_of(order: process_channel.Message) -> ServeConfig:
    """The configuration of the server, with the secrets that its processes share."""
    config = config_from(Settings.from_plain(SERVE_OPTIONS, order["settings"]))
    operator_keys = frozenset(map(Secret.from_digest, order["operator_keys"]))
    return replace(
        config,
        http=replace(config.http, operator_keys=operator_keys),
        deployment_secret=bytes.fromhex(order["deployment_secret"]),
        warnings=(),
    )


def main(arguments: list[str]) -> int:
    """Reads the configuration from the channel and serves; returns the exit code."""
    faulthandler.enable()
    channel, listener = (socket.socket(fileno=int(fd)) for fd in arguments)
    listener.setblocking(False)
    order = process_channel.receive(channel)
    if order is None:
        return 1
    config = configuration_of(order)
    set_up_logging(config.http)
    # The process that found the model has logged its warnings.
    logging.getLogger("llmstack_llm.model.generation_config").setLevel(logging.ERROR)
    return Worker(
        config, listener, channel, order["index"], order["count"], Path(order["directory"]), order["is_replacement"]
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
