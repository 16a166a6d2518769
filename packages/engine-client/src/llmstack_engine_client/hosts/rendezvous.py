"""The first machine of an endpoint: the engine cores that the others have."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import secrets
from collections.abc import Mapping
from typing import Protocol

from llmstack_engine_client.hosts.members import Members
from llmstack_engine_client.hosts.membership import Membership, OnChange
from llmstack_engine_client.hosts.messages import Answer, Facts, Failed, Join, Leave, Message, Start, own_version
from llmstack_engine_client.hosts.network import FirstMachine
from llmstack_engine_core.config import EngineConfig, HostsConfig
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

# Found by name: the package is above this one.
_LAUNCHERS = {"ray": "llmstack_parallel.ray_hosts:RayHosts"}


def first_machine(hosts: HostsConfig, key_file: str | None) -> FirstMachine:
    """The machine of an endpoint where the others join."""
    return FirstMachine(hosts.address, key_file, hosts.heartbeat_timeout_s)


def facts_of(hosts: HostsConfig) -> Facts:
    """The facts that are equal on all machines of an endpoint."""
    return (("version", own_version()), ("--data-parallel-size", str(hosts.size)))


class HostsLauncher(Protocol):
    """The launcher of engine cores on other machines."""

    def close(self) -> None:
        """Ends them, and gives back what they had."""
        ...


def make_launcher(config: EngineConfig, hosts: HostsConfig) -> HostsLauncher | None:
    """The launcher of engine cores on other machines; None if their operators start them.

    Raises:
        EngineStartError: It cannot be imported, or cannot start them.
    """
    if hosts.backend not in _LAUNCHERS:
        return None
    module_name, _, class_name = _LAUNCHERS[hosts.backend].partition(":")
    try:
        launcher_class = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise EngineStartError(f"--data-parallel-backend {hosts.backend}: pip install llmstack-parallel") from error
    launcher: HostsLauncher = launcher_class(config, hosts)
    return launcher


class Generation(Membership):
    """The engine cores of other machines that one `Start` has started, or those of the start.

    Attributes:
        start: The order by which the machines start them.
        awaited: The engine cores of the machines that were there then: it is of no use without them.
        problem: Why it is of no use; empty where it may be.
    """

    def __init__(self, rendezvous: Rendezvous, start: Start, hosts: Mapping[int, str]) -> None:
        """`hosts`: The machine of each awaited engine core."""
        super().__init__()
        self.start, self.problem = start, ""
        self.awaited = sorted(hosts)
        self._hosts = hosts
        self._rendezvous = rendezvous

    def serve(self, on_change: OnChange) -> None:
        """Also answers the machines from now on."""
        super().serve(on_change)
        self._rendezvous.begin()

    def find_problem(self) -> str:
        """Why the generation is of no use; empty where it may be."""
        if not self.problem and (absent := {*self.awaited} - self._rendezvous.find_present()):
            self.note_problem(f"{self._hosts[min(absent)]} is away")
        return self.problem

    def note_problem(self, problem: str) -> None:
        """Notes why it is of no use; the first reason stays."""
        self.problem = self.problem or problem

    def refuse(self, rank: int, reason: str) -> None:
        """Sends the machine of an engine core away, with these engine cores of it."""
        self.note_problem(reason)
        for join in self._rendezvous.dismiss(Answer(reason), rank, self.start.generation):
            self.drop(join)

    async def close(self) -> None:
        """The machines end these engine cores; without others the endpoint ends. Idempotent."""
        await self._rendezvous.end(self)


class Rendezvous:
    """Listens on the address that the other machines are given. Constructed outside of a loop, used on one."""

    def __init__(self, config: EngineConfig) -> None:
        """Also starts the engine cores of the other machines, where their operators do not.

        Raises:
            EngineStartError: The address cannot be listened on, there is no key for it, or they cannot be started.
        """
        hosts = config.hosts
        if hosts is None:
            raise EngineStartError("there are no other machines")
        numbers = range(hosts.num_local, hosts.size)
        self._members = Members(first_machine(hosts, config.key_file), "engine core", numbers, facts_of(hosts))
        try:
            self._launcher = make_launcher(config, hosts)
        except BaseException:
            self._members.close()
            raise
        self._generations: dict[str, Generation] = {}  # the latest one is the last
        self._numbers, self._boot = itertools.count(), secrets.token_hex(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def open(self, name: str) -> Generation:
        """Begins with the engine cores of the start, and later lets all machines that are there start others.

        `name`: What they serve, in the list of each machine.
        """
        number = next(self._numbers)
        start = Start(f"{self._boot}:{number}" if number else "", name)
        present = [join for sender, join in self._members.joined.items() if self._send(sender, start)]
        hosts = {rank: join.host for join in present for rank in join.numbers}
        generation = self._generations[start.generation] = Generation(self, start, hosts)
        return generation

    async def end(self, generation: Generation) -> None:
        """Lets the machines end the engine cores of a generation; the last one is the end of all. Idempotent."""
        if self._generations.pop(generation.start.generation, None) is None:
            return
        for sender, join in list(self._members.joined.items()):
            if join.generation == generation.start.generation:
                self._send_off(sender)
        if not self._generations:
            await self.close()

    def _send_off(self, sender: bytes) -> None:
        """Ends engine cores of another generation, where the machine has those of the latest one, or starts them."""
        del self._members.joined[sender]
        if self._generations:
            self._send(sender, next(reversed(self._generations.values())).start)
        self._send(sender, Leave())

    def begin(self) -> None:
        """Answers from now on. Idempotent."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        for socket in self._members.sockets:
            self._loop.add_reader(socket.fileno(), self._read)
        self._read()

    def _read(self) -> None:
        if self._is_closed:
            return
        for sender, join, message in self._members.read():
            self._note(sender, join, message)

    def _note(self, sender: bytes, join: Join, message: Message) -> None:
        key = message.generation if isinstance(message, Failed) else join.generation
        generation = self._generations.get(key)
        if isinstance(message, Join) and generation is None:
            logger.info("%s has engine cores of an earlier reload, and starts others", join.host)
            self._send_off(sender)
        if isinstance(message, Failed):
            logger.warning("%s: %s", join.host, message.reason)
        if generation is None:
            return
        if isinstance(message, Join):
            generation.add(join)
        elif isinstance(message, Leave):
            generation.note_problem(f"{join.host} has left")
            generation.drop(join)
        elif isinstance(message, Failed):
            generation.note_problem(f"{join.host}: {message.reason}")

    def dismiss(self, answer: Answer, rank: int, generation: str) -> list[Join]:
        """Sends the machine of an engine core away, which is returned."""
        joined = self._members.joined
        found = [sender for sender, join in joined.items() if rank in join.numbers and join.generation == generation]
        for sender in found:
            self._send(sender, answer)
        return [joined.pop(sender) for sender in found]

    def find_present(self) -> set[int]:
        """The engine cores of all machines that have joined."""
        present = [join.numbers for sender, join in list(self._members.joined.items()) if self._send(sender, Answer())]
        return {rank for numbers in present for rank in numbers}

    def _send(self, sender: bytes, message: Message) -> bool:
        """As `Members.send`. ZeroMQ tells once that something can be read, and a send may take note of that."""
        if self._loop is not None:
            self._loop.call_soon(self._read)
        return self._members.send(sender, message)

    async def close(self) -> None:
        """Tells the machines that the endpoint ends, and ends what was started there. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            for socket in self._members.sockets:
                self._loop.remove_reader(socket.fileno())
        await asyncio.to_thread(self._members.close)
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.close)
