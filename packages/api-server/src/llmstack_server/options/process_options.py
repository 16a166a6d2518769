"""Options of processes: how many answer HTTP, and where engine cores run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.options import option, option_group

if TYPE_CHECKING:
    from llmstack_llm import EngineArgs


_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smh]?)")
_UNIT_TO_S: Final = {"s": 1, "m": 60, "h": 3600}


def read_duration(text: str) -> float:
    """Seconds of a text such as `600`, `90s`, `10m` or `2h`.

    Raises:
        ValueError: It has another form.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:16]!r} is not a time such as 90s, 10m or 2h")
    return float(match[1]) * _UNIT_TO_S[match[2] or "s"]


@option_group
class ProcessConfig(OptionGroup):
    """Processes of one server.

    Attributes:
        engine_addresses: Where engine cores listen: those of this server when headless, else those to attach to.
    """

    title = "Processes"

    num_api_servers: int = option(
        1,
        flag="--api-server-count",
        short="-asc",
        at_least=0,
        help="processes that answer HTTP on one port; 0 is --headless",
    )
    is_headless: bool = option(False, flag="--headless", help="run engine cores without HTTP")
    is_multiprocess: bool = option(
        True,
        flag="--disable-frontend-multiprocessing",
        sets=False,
        help="run the engine core in the process that answers HTTP",
    )
    engine_addresses: tuple[str, ...] = option(
        (),
        flag="--engine-address",
        metavar="ADDRESS",
        help="address of each engine core, ipc:///path or tcp://127.0.0.1:port: to listen on with --headless, "
        "else to attach to",
    )
    has_sleep_mode: bool = option(
        False, flag="--enable-sleep-mode", help="add POST /sleep and /wake_up to the control routes"
    )
    idle_sleep_s: float | None = option(
        None,
        flag="--idle-sleep",
        read=read_duration,
        at_least=1,
        aliases={"0": None},
        metavar="TIME",
        help="time without requests, such as 90s, 10m or 2h, after which the engine gives memory back until the next "
        "one (default: never)",
        example="10m",
    )
    idle_sleep_level: int = option(
        1,
        at_least=1,
        at_most=2,
        metavar="LEVEL",
        help="1 frees the KV cache while the engine sleeps, 2 the weights too, which are read again",
    )

    def __post_init__(self) -> None:
        if self.num_api_servers == 0:
            object.__setattr__(self, "is_headless", True)
        super().__post_init__()

    @property
    def is_attached(self) -> bool:
        """Whether the engine cores were started elsewhere."""
        return bool(self.engine_addresses) and not self.is_headless

    def conflicts(self) -> Iterator[Problem]:
        """Adds processes that would share an engine core, or have none."""
        yield from super().conflicts()
        if self.is_headless and self.num_api_servers > 1:
            yield _exclusive("{is_headless}", f"{{num_api_servers}} {self.num_api_servers}", "headless serves no HTTP")
        if len(set(self.engine_addresses)) != len(self.engine_addresses):
            yield Problem("{engine_addresses}: an address is given twice")
        if self.is_multiprocess:
            return
        alone = "{is_multiprocess}"
        if self.is_headless:
            yield _exclusive(alone, "{is_headless}", "there is no process that answers HTTP")
        if self.num_api_servers > 1:
            yield _exclusive(alone, f"{{num_api_servers}} {self.num_api_servers}", "they would share one engine core")
        if self.engine_addresses:
            yield _exclusive(alone, "{engine_addresses}", "the engine core runs elsewhere already")

    def conflicts_with_engines(self, num_engines: int, *, has_spare: bool = False) -> Iterator[Problem]:
        """Contradictions with options of the engine: the number of engine cores, and the warm spare."""
        if has_spare and self.is_attached:
            yield _exclusive("{warm_spare}", "{engine_addresses}", "what runs the engine cores replaces them")
        if has_spare and not self.is_multiprocess:
            yield _exclusive("{warm_spare}", "{is_multiprocess}", "the engine core has no process of its own")
        if num_engines > 1 and not self.is_multiprocess:
            size = f"{{data_parallel_size}} {num_engines}"
            yield _exclusive("{is_multiprocess}", size, "one process holds one engine core")
        if self.idle_sleep_s is not None:
            yield from self._idle_conflicts()
        addresses = self.engine_addresses
        is_default = num_engines == 1 and self.is_attached
        if addresses and not is_default and len(addresses) != num_engines:
            yield Problem(
                "{engine_addresses}: {count} given for {data_parallel_size} {num_engines}; give one each",
                count=len(addresses), num_engines=num_engines,
            )  # fmt: skip

    def _idle_conflicts(self) -> Iterator[Problem]:
        """Contradictions with a sleep that one process decides on alone."""
        if self.is_headless:
            yield _exclusive("{idle_sleep_s}", "{is_headless}", "what has the requests knows when there are none")
        if self.num_api_servers > 1:
            size = f"{{num_api_servers}} {self.num_api_servers}"
            yield _exclusive("{idle_sleep_s}", size, "none of them knows the requests of the others")
        if self.is_attached:
            yield _exclusive("{idle_sleep_s}", "{engine_addresses}", "others may use the engine core")

    def conflicts_with_hosts(self, engine: EngineArgs) -> Iterator[Problem]:
        """Contradictions with engine cores on other machines."""
        rank = f"{{data_parallel_start_rank}} {engine.data_parallel_start_rank}"
        if engine.data_parallel_start_rank and not self.is_headless:
            yield Problem(f"{rank} needs {{is_headless}}: the first machine has the first engine cores")
        if self.is_attached and engine.nnodes > 1:
            yield _exclusive(
                "{engine_addresses}", f"{{nnodes}} {engine.nnodes}", "the engine core has its ranks already"
            )
        if not engine.has_other_hosts:
            return
        size = f"{{data_parallel_size_local}} {engine.num_local_engines} of {engine.data_parallel_size}"
        if self.is_headless and engine.data_parallel_backend == "ray":
            yield _exclusive(
                "{data_parallel_backend} ray", "{is_headless}", "Ray starts the engine cores of all machines"
            )
        elif self.is_headless and not engine.num_local_engines:
            yield _exclusive(size, "{is_headless}", "this machine would do nothing")
        if self.is_attached:
            yield _exclusive(size, "{engine_addresses}", "the other machines join by themselves")
        if not self.is_multiprocess:
            yield _exclusive(size, "{is_multiprocess}", "engine cores of several machines have processes of their own")


def _exclusive(first: str, second: str, reason: str) -> Problem:
    return Problem(f"{first} and {second} exclude each other: {reason}")
