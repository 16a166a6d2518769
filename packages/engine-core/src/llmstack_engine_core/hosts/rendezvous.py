"""The side of the first machine: which other machines are welcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.hosts.messages import MAX_MESSAGE_BYTES, Answer, Join, Leave, own_version, pack, unpack
from llmstack_engine_core.ipc.addresses import check_address
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.keys import keys_for
from llmstack_engine_core.ipc.sockets import serve_keys, set_heartbeats
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

FAREWELL_MS = 200
MAX_WAITING_MESSAGES = 1000


class Rendezvous:
    """Listens on the address that the other machines are given. Constructed outside of a loop, used on one."""

    def __init__(self, hosts: HostsConfig, key_file: str | None, num_local: int) -> None:
        """`num_local`: Engine cores of this machine, whose numbers no other may have.

        Raises:
            EngineStartError: It cannot be listened on, or there is no key for it.
        """
        check_address(hosts.address, is_remote=True)
        keys = keys_for(hosts.address, key_file)
        self._hosts = hosts
        self._num_local = num_local
        self._joined: dict[bytes, Join] = {}
        self._serving: asyncio.Task[None] | None = None
        self._loop_socket: zmq.asyncio.Socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, FAREWELL_MS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RCVHWM, MAX_WAITING_MESSAGES),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            serve_keys(self._context, self._socket, keys)
        set_heartbeats(self._socket, hosts.heartbeat_timeout_s)
        try:
            self._socket.bind(hosts.address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise EngineStartError(f"{hosts.address} cannot be listened on: {error.strerror}") from error

    def serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        """Answers from now on; calls `on_join` for a machine that is welcome, `on_leave` for one that ends. Idempotent.

        Every machine is welcome whose ranks no other one has, and whose version and model are these.
        """
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve(on_join, on_leave))

    async def _serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        self._loop_socket = socket = zmq.asyncio.Socket.from_socket(self._socket)
        try:
            while True:
                self._receive(await socket.recv_multipart(), on_join, on_leave)
        finally:  # the loop must not watch the number of a descriptor that is closed
            asyncio.get_running_loop().remove_reader(int(self._socket.getsockopt(zmq.FD)))

    def _receive(self, frames: list[bytes], on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        sender, *frames = frames
        try:
            message = unpack(frames[0]) if len(frames) == 1 else Answer()
        except CodecError as error:
            logger.warning("refused a message of another machine: %s", error)
            self._answer(sender, Answer(f"the first machine runs llmstack {own_version()}: {error}"))
            return
        if isinstance(message, Join):
            answer = self._answer_to(sender, message)
            self._answer(sender, answer)
            if answer.refusal:
                logger.warning("refused %s: %s", message.host, answer.refusal)
                return
            self._joined[sender] = message
            on_join(message)
        elif isinstance(message, Leave) and sender in self._joined:
            on_leave(self._joined.pop(sender))

    def _answer_to(self, sender: bytes, join: Join) -> Answer:
        if problem := self._problem(join):
            return Answer(problem)
        for other, joined in list(self._joined.items()):
            if other == sender or not _overlap(joined, join):
                continue
            # A machine that rejoins may be faster than the notice of its end.
            if self._answer(other, Answer()):
                shared = max(joined.start_rank, join.start_rank)
                return Answer(f"engine core {shared} is on {joined.host} already, and on {join.host}", is_final=False)
            del self._joined[other]
        return Answer()

    def _problem(self, join: Join) -> str:
        """Why a machine cannot join; empty where it can."""
        ours, hosts = own_version(), self._hosts
        if join.version != ours:
            return f"the first machine runs llmstack {ours}, but {join.host} runs {join.version}"
        if join.size != hosts.size:
            return f"--data-parallel-size is {hosts.size} on the first machine, but {join.size} on {join.host}"
        if join.ranks.stop > hosts.size:
            last = join.ranks.stop - 1
            return f"--data-parallel-size is {hosts.size} on the first machine, but {join.host} has engine core {last}"
        if join.start_rank < self._num_local:
            own = f"engine cores 0 to {self._num_local - 1}"
            return f"the first machine has {own}, but {join.host} begins with {join.start_rank}"
        try:
            for address in join.addresses:
                check_address(address, is_remote=True)
        except EngineStartError as error:
            return str(error)
        return ""

    def refuse(self, rank: int, reason: str) -> None:
        """Sends the machine of an engine core away."""
        for sender, join in list(self._joined.items()):
            if rank in join.ranks:
                del self._joined[sender]
                self._answer(sender, Answer(reason))

    def host_of(self, rank: int) -> str:
        """The machine of an engine core."""
        hosts = (join.host for join in self._joined.values() if rank in join.ranks)
        return next(hosts, f"the machine of engine core {rank}")

    def _answer(self, sender: bytes, message: Answer | Leave) -> bool:
        """Whether the machine is there; one that has gone will ask again."""
        if self._loop_socket is None:
            return False
        # It is sent at once, or not at all.
        sending: Any = self._loop_socket.send_multipart([sender, pack(message)], zmq.NOBLOCK)
        return bool(sending.done() and sending.exception() is None)

    async def close(self) -> None:
        """Tells the machines that the endpoint ends. Idempotent."""
        if self._socket.closed:
            return
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for sender in self._joined:
            self._answer(sender, Leave())
        self._socket.close()
        await asyncio.to_thread(self._context.term)


def _overlap(join: Join, other: Join) -> bool:
    return join.start_rank < other.ranks.stop and other.start_rank < join.ranks.stop
