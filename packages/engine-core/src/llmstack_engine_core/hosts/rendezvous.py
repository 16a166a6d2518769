"""The side of the first machine: which other machines are welcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.hosts.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Join,
    Leave,
    Load,
    LoadFailed,
    Message,
    own_version,
    pack,
    unpack,
)
from llmstack_engine_core.ipc.addresses import check_address
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.keys import keys_for
from llmstack_engine_core.ipc.sockets import serve_keys, set_heartbeats
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

FAREWELL_MS = 200
MAX_WAITING_MESSAGES = 1000


class Generation:
    """The engine cores of other machines that one `Load` has started, or those of the start.

    Attributes:
        load: The order by which the machines start them.
        awaited: The engine cores of the machines that were there then: it is of no use without them.
        problem: Why it is of no use; empty where it may be.
    """

    def __init__(self, rendezvous: Rendezvous, load: Load, hosts: Mapping[int, str]) -> None:
        """`hosts`: The machine of each awaited engine core."""
        self.load, self.problem = load, ""
        self.awaited: Sequence[int] = sorted(hosts)
        self._hosts = hosts
        self._rendezvous = rendezvous
        self.on_join: Callable[[Join], None] = lambda join: None
        self.on_leave: Callable[[Join], None] = lambda join: None

    def serve(self, on_join: Callable[[Join], None], on_leave: Callable[[Join], None]) -> None:
        """As `Rendezvous.serve`, for machines with these engine cores."""
        self.on_join, self.on_leave = on_join, on_leave
        self._rendezvous.begin()

    def find_problem(self) -> str:
        """Why the generation is of no use; empty where it may be."""
        if not self.problem and (absent := {*self.awaited} - self._rendezvous.find_present()):
            self.problem = f"{self._hosts[min(absent)]} is away"
        return self.problem

    def refuse(self, rank: int, reason: str) -> None:
        """Sends the machine of an engine core away, with these engine cores of it."""
        self.problem = self.problem or reason
        self._rendezvous.refuse(rank, reason, self.load.generation)

    def host_of(self, rank: int) -> str:
        """The machine of an engine core."""
        return self._rendezvous.host_of(rank)

    async def close(self) -> None:
        """The machines end these engine cores; without others the endpoint ends. Idempotent."""
        await self._rendezvous.end(self)


class Rendezvous:
    """Listens on the address that the other machines are given. Constructed outside of a loop, used on one.

    Attributes:
        awaited: No engine core of another machine is needed for the start.
    """

    awaited: Sequence[int] = ()

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
        self._generations: dict[str, Generation] = {}  # the latest one is the last
        self._numbers, self._boot = itertools.count(), secrets.token_hex(8)
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
            self.open(self._hosts.weights_name).serve(on_join, on_leave)

    def open(self, name: str) -> Generation:
        """Begins with the engine cores of the start, and later lets all machines that are there start others.

        `name`: What they serve, in the list of each machine.
        """
        number = next(self._numbers)
        load = Load(f"{self._boot}:{number}" if number else "", name)
        present = {sender: join for sender, join in self._joined.items() if self._answer(sender, load)}
        hosts = {rank: join.host for join in present.values() for rank in join.ranks}
        generation = self._generations[load.generation] = Generation(self, load, hosts)
        return generation

    async def end(self, generation: Generation) -> None:
        """Lets the machines end the engine cores of a generation; the last one is the end of all. Idempotent."""
        if self._generations.pop(generation.load.generation, None) is None:
            return
        for sender, join in list(self._joined.items()):
            if join.generation == generation.load.generation:
                del self._joined[sender]
                self._send_off(sender)
        if not self._generations:
            await self.close()

    def _send_off(self, sender: bytes) -> None:
        """Ends engine cores of another generation, where the machine has those of the latest one, or starts them."""
        if self._generations:
            self._answer(sender, next(reversed(self._generations.values())).load)
        self._answer(sender, Leave())

    def begin(self) -> None:
        """Answers from now on. Idempotent."""
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        self._loop_socket = socket = zmq.asyncio.Socket.from_socket(self._socket)
        try:
            while True:
                self._receive(await socket.recv_multipart())
        finally:  # the loop must not watch the number of a descriptor that is closed
            asyncio.get_running_loop().remove_reader(int(self._socket.getsockopt(zmq.FD)))

    def _receive(self, frames: list[bytes]) -> None:
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
            generation = self._generations.get(message.generation)
            if generation is None:
                logger.info("%s has engine cores of an earlier reload, and starts others", message.host)
                self._send_off(sender)
                return
            self._joined[sender] = message
            generation.on_join(message)
        elif sender in self._joined:
            self._note(sender, message)

    def _note(self, sender: bytes, message: Message) -> None:
        """Takes a later message of a machine that has joined."""
        join = self._joined[sender]
        if isinstance(message, Leave):
            del self._joined[sender]
            if (generation := self._generations.get(join.generation)) is not None:
                generation.problem = generation.problem or f"{join.host} has left"
                generation.on_leave(join)
        elif isinstance(message, LoadFailed):
            logger.warning("%s: %s", join.host, message.reason)
            if (generation := self._generations.get(message.generation)) is not None:
                generation.problem = generation.problem or f"{join.host}: {message.reason}"

    def _answer_to(self, sender: bytes, join: Join) -> Answer:
        if problem := self._problem(join):
            return Answer(problem)
        for other, joined in list(self._joined.items()):
            if other == sender or joined.generation != join.generation or not _overlap(joined, join):
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

    def refuse(self, rank: int, reason: str, generation: str = "") -> None:
        """Sends the machine of an engine core away."""
        for sender, join in list(self._joined.items()):
            if rank in join.ranks and join.generation == generation:
                del self._joined[sender]
                self._answer(sender, Answer(reason))

    def find_problem(self) -> str:
        """There is none: an endpoint can begin without other machines."""
        return ""

    def find_present(self) -> set[int]:
        """The engine cores of all machines that are there."""
        present = [join.ranks for sender, join in list(self._joined.items()) if self._answer(sender, Answer())]
        return {rank for ranks in present for rank in ranks}

    def host_of(self, rank: int) -> str:
        """The machine of an engine core."""
        hosts = (join.host for join in self._joined.values() if rank in join.ranks)
        return next(hosts, f"the machine of engine core {rank}")

    def _answer(self, sender: bytes, message: Message) -> bool:
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
