"""`llmstack serve` on a machine that joins another one.

With `--headless` it runs engine cores, with `--node-rank` ranks of a model.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llmstack_engine_client.hosts.machine import EnginesEndedError, Machine
from llmstack_engine_client.hosts.messages import Start
from llmstack_engine_client.processes.engines import EngineProcesses
from llmstack_engine_core.ipc.addresses import free_addresses
from llmstack_model_files import ModelFilesError
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.reload_options import engine_args_of
from llmstack_server.serving.engine_processes import launch_engine_processes, run_until_signal, start_engine_processes
from llmstack_server.serving.event_loop import EarlySignals, in_daemon_thread
from llmstack_server.serving.launcher import StageTimer, one_line, resolve_engine_args, start_error
from llmstack_types import EngineStartError, LLMStackError

if TYPE_CHECKING:
    from llmstack_engine_core.config import EngineConfig

logger = logging.getLogger(__name__)

# Found by name: the package is no dependency of the server.
_AGENT: Final = "llmstack_parallel.hosts.agent"


def run_joined(config: ServeConfig, timer: StageTimer, signals: EarlySignals) -> int:
    """Runs engine cores for the first machine, until a signal, its end, or the end of the last engine core (1).

    Raises:
        ServeError: They could not start, or the first machine refuses them.
    """
    machine = Machine(_Launches(config, timer).launch)
    try:
        return run_until_signal(machine.run, signals)
    except EnginesEndedError:
        return 1
    except LLMStackError as error:
        raise ServeError(one_line(error)) from error


def run_node(config: ServeConfig) -> int:
    """Hosts ranks until a signal, or the end of the machine that answers HTTP (exit code 0).

    Raises:
        ServeError: The model cannot run here, or the first machine refuses this one or is not there.
    """
    from llmstack_llm.model.preflight import check_model_runs

    engine, signals = config.engine, EarlySignals()
    try:
        with signals.installed():
            _, engine_config = resolve_engine_args(config).create_engine_config()
            check_model_runs(engine_config)
            agent = importlib.import_module(_AGENT)
        logger.info("machine %d of %d joins %s", engine.node_rank, engine.nnodes, engine.master_addr)
        make_node = partial(agent.NodeAgent, engine_config.model, engine_config.start_timeout_s)
        return run_until_signal(partial(_host_ranks, make_node), signals)
    except ImportError as error:
        raise ServeError("--nnodes: pip install llmstack-parallel") from error
    except (LLMStackError, OSError, ValueError) as error:  # ValueError: what a runner says of a model, in one line
        raise start_error(error) from error


async def _host_ranks(make_node: Callable[[], Any]) -> None:
    """`make_node`: Reads all of the weights, for the digest that the first machine compares."""
    node = await in_daemon_thread(make_node, "digest")
    await node.run()


class _Launches:
    """Starts of engine cores of this machine."""

    def __init__(self, config: ServeConfig, timer: StageTimer) -> None:
        self._config, self._timer = config, timer
        self._start_model_path = ""

    async def launch(self, start: Start) -> EngineProcesses:
        """Starts the engine cores of the command line, or later those of an entry of this machine's list.

        Raises:
            ServeError: Those of the command line cannot be started.
            EngineStartError: The others cannot.
        """
        if start.generation:
            return await in_daemon_thread(partial(self._launch_entry, start.name), "start-engines")
        engines = await in_daemon_thread(partial(start_engine_processes, self._config, self._timer), "start-engines")
        self._start_model_path = engines.model_path
        return engines

    def _launch_entry(self, name: str) -> EngineProcesses:
        from llmstack_llm.model.preflight import find_memory_problem

        entries = self._config.reload.entries
        if name not in entries:
            raise EngineStartError(f"--reload-models has no entry {name}")
        arguments = engine_args_of(entries[name], self._config.engine, self._start_model_path)
        try:
            config: EngineConfig = arguments.create_engine_config()[1]
            if problem := find_memory_problem(config):
                raise EngineStartError(problem)
            addresses = free_addresses(str(arguments.data_parallel_address), arguments.num_local_engines)
            return launch_engine_processes(arguments, addresses)
        except (LLMStackError, ModelFilesError, OSError) as error:
            raise EngineStartError(one_line(error)) from error
