"""Engine cores of a process that starts and watches them but sends no requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmstack_server.options.config import ServeConfig
from llmstack_server.serving.launcher import StageTimer, resolve_engine_args, start_error
from llmstack_types import LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_core.supervisor import EngineProcess
    from llmstack_llm import EngineArgs


@dataclass(slots=True)
class EngineProcesses:
    """The engine cores of one server, or the addresses of engine cores run elsewhere.

    Attributes:
        model_path: The folder of the model.
        addresses: Addresses of the engine cores, in their order.
        processes: Processes started here; none where the engine cores run elsewhere.
    """

    model_path: str
    addresses: list[str]
    processes: list[EngineProcess] = field(default_factory=list)

    def watch(self, on_death: Callable[[str, bool], None]) -> None:
        """Calls `on_death` on the running loop when a process ends, with one line and whether it was killed.

        A process that hangs is ended.
        """
        loop = asyncio.get_running_loop()

        def ended(index: int, process: EngineProcess) -> None:
            loop.remove_reader(process.death_fd)
            on_death(f"engine core {index} has ended: {process.describe_end()}", process.was_killed)

        def look(process: EngineProcess) -> None:
            process.look()
            if process.is_alive:
                loop.call_later(process.look_interval_s, look, process)

        for index, process in enumerate(self.processes):
            loop.add_reader(process.death_fd, ended, index, process)
            look(process)

    async def stop(self) -> None:
        """Stops all processes at the same time and removes their files; takes at most their grace period."""
        for process in self.processes:
            asyncio.get_running_loop().remove_reader(process.death_fd)
            process.terminate()
        for process in self.processes:
            await asyncio.to_thread(process.stop)


def start_engine_processes(config: ServeConfig, timer: StageTimer) -> EngineProcesses:
    """Finds or downloads the model, and starts the engine cores without waiting for them.

    Raises:
        ServeError: The model cannot be found, an address cannot be used, or an argument contradicts the model.
    """
    addresses = list(config.processes.engine_addresses)
    with timer.stage("resolve model"):
        arguments = resolve_engine_args(config)
    if config.processes.is_attached:
        return EngineProcesses(arguments.model, addresses)
    with timer.stage("start engine processes"):
        try:
            return _launch(arguments, addresses)
        except (LLMStackError, OSError) as error:
            raise start_error(error) from error


def _launch(arguments: EngineArgs, addresses: Sequence[str]) -> EngineProcesses:
    from llmstack_engine_core.client.factory import engine_configs
    from llmstack_engine_core.launcher import launch_engine_process
    from llmstack_llm.model.preflight import check_model_runs

    _, engine_config = arguments.create_engine_config()
    check_model_runs(engine_config)
    configs = engine_configs(engine_config)
    places = addresses or [""] * len(configs)
    engines = EngineProcesses(arguments.model, [])
    for config, address in zip(configs, places, strict=True):
        engines.processes.append(launch_engine_process(config, address or None))
    engines.addresses = [process.address for process in engines.processes]
    return engines
