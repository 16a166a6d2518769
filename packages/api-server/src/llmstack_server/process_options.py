"""How a server is spread over processes, as its flags say."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from llmstack_server.errors import ServeError


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Processes of one server.

    Attributes:
        num_api_servers: How many answer HTTP.
        is_headless: None does; the engine cores wait for servers to attach.
        is_multiprocess: Engine cores have processes of their own.
        engine_addresses: Where engine cores listen: our own when headless, else those to attach to.
        has_sleep_mode: `/sleep` and `/wake_up` are among the control routes.
    """

    num_api_servers: int = 1
    is_headless: bool = False
    is_multiprocess: bool = True
    engine_addresses: tuple[str, ...] = ()
    has_sleep_mode: bool = False

    @property
    def is_attached(self) -> bool:
        """Somebody else runs the engine cores."""
        return bool(self.engine_addresses) and not self.is_headless


def process_config(namespace: argparse.Namespace) -> ProcessConfig:
    """The processes that the flags ask for.

    Raises:
        ServeError: Flags contradict each other; the text names them.
    """
    config = ProcessConfig(
        num_api_servers=namespace.api_server_count,
        is_headless=namespace.headless or namespace.api_server_count == 0,
        is_multiprocess=not namespace.disable_frontend_multiprocessing,
        engine_addresses=tuple(namespace.engine_address),
        has_sleep_mode=namespace.enable_sleep_mode,
    )
    _check_frontend(config, namespace.data_parallel_size)
    _check_addresses(config, namespace.data_parallel_size)
    return config


def _check_frontend(config: ProcessConfig, num_engines: int) -> None:
    if config.is_headless and config.num_api_servers > 1:
        raise _contradiction("--headless", f"--api-server-count {config.num_api_servers}", "headless is none")
    if config.is_multiprocess:
        return
    alone = "--disable-frontend-multiprocessing"
    if config.is_headless:
        raise _contradiction(alone, "--headless", "there is no process that answers HTTP")
    if config.num_api_servers > 1:
        raise _contradiction(alone, f"--api-server-count {config.num_api_servers}", "they would share one engine core")
    if num_engines > 1:
        raise _contradiction(alone, f"--data-parallel-size {num_engines}", "one process holds one engine core")
    if config.engine_addresses:
        raise _contradiction(alone, "--engine-address", "the engine core runs elsewhere already")


def _check_addresses(config: ProcessConfig, num_engines: int) -> None:
    addresses = config.engine_addresses
    if len(set(addresses)) != len(addresses):
        raise ServeError("--engine-address: an address is given twice", exit_code=2)
    is_default = num_engines == 1 and config.is_attached
    if addresses and not is_default and len(addresses) != num_engines:
        raise ServeError(
            f"--engine-address: {len(addresses)} given for --data-parallel-size {num_engines}; give one each",
            exit_code=2,
        )


def _contradiction(flag: str, other: str, reason: str) -> ServeError:
    return ServeError(f"{flag} and {other} exclude each other: {reason}", exit_code=2)
