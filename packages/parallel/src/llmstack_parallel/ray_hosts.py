"""Engine cores as actors of a Ray cluster that the operator runs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from llmstack_engine_core import EngineConfig
from llmstack_engine_core.config import HostsConfig
from llmstack_parallel import ray_probe
from llmstack_parallel.ray_host import RayHost, pack_order
from llmstack_parallel.ray_signals import own_signal_handlers
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 60.0
PLACEMENT_TIMEOUT_S: Final = 60.0
_TOKEN_FILE: Final = Path("~/.ray/auth_token")  # Ray's own place
_TOKEN_VARIABLES: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class RayHosts:
    """Places one actor for each engine core, spread over the nodes. Requests and tokens do not pass Ray."""

    def __init__(self, config: EngineConfig, hosts: HostsConfig) -> None:
        """Joins the cluster and starts the actors; they join this machine by themselves.

        Raises:
            EngineStartError: Ray is not installed, there is no cluster, it asks for no token, or it has no room.
        """
        self._ray = ray = join_cluster("--data-parallel-backend", allow_without_token=hosts.allow_ray_without_token)
        try:
            self._group = self._place(config, hosts.size)
            self._actors = self._start(config, hosts.size)
            self._wait()
        except BaseException:
            ray.shutdown()
            raise

    def _place(self, config: EngineConfig, size: int) -> Any:
        ray = self._ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._num_per_node = -(-size // max(1, len(nodes)))
        if config.model.placement is None:
            self._bundle = bundle(nodes, self._num_per_node, config.model.num_ranks)
        else:  # the other ranks are placed by the engine core
            self._bundle = bundle(nodes, -(-size * config.model.num_ranks // max(1, len(nodes))), 1)
        group = ray.util.placement_group([self._bundle] * size, strategy="SPREAD")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            needs = ", ".join(f"{count:g} {name}" for name, count in self._bundle.items())
            ray.util.remove_placement_group(group)
            raise EngineStartError(f"the Ray cluster has no room for {size} engine cores with {needs} each")
        return group

    def _start(self, config: EngineConfig, size: int) -> list[Any]:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = self._ray.remote(RayHost)
        # Each takes its share of its node.
        config = replace(config, model=replace(config.model, num_engines=self._num_per_node))
        return [
            actor_class.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(pack_order(config, rank))
            for rank in range(size)
        ]

    def _wait(self) -> None:
        try:
            self._ray.get([actor.pid.remote() for actor in self._actors], timeout=PLACEMENT_TIMEOUT_S)
        except Exception as error:  # Ray has many kinds
            raise EngineStartError(
                f"the actors of the engine cores do not start ({type(error).__name__}): "
                "each node needs this version of llmstack, and Ray's logs have the reason"
            ) from error

    def close(self) -> None:
        """Ends the actors and leaves the cluster."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # its node is gone
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def bundle(nodes: list[dict[str, float]], num_per_node: int, num_ranks: int) -> dict[str, float]:
    """The resources of an engine core, where so many are on each node."""
    if any(node.get("GPU") for node in nodes):
        return {"CPU": 1.0, "GPU": float(num_ranks)}
    least = min((node.get("CPU", 1.0) for node in nodes), default=1.0)
    return {"CPU": max(1.0, float(least // num_per_node))}


def cluster_address() -> str:
    """The address of the cluster's head, from `RAY_ADDRESS`.

    Raises:
        EngineStartError: It names no running cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        given = f", but is {address[:128]!r}" if address else ""
        raise EngineStartError(f"RAY_ADDRESS must be HOST:PORT of a running Ray cluster{given}; none is started here")
    return address


def check_token(address: str) -> None:
    """Refuses a cluster that every program may use that reaches it.

    Raises:
        EngineStartError: It answers without a token, or not at all.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _TOKEN_VARIABLES}
    environment |= {
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    try:
        status = subprocess.run(
            [sys.executable, "-P", "-m", "llmstack_parallel.ray_probe", address],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        status = ray_probe.DOES_NOT_ANSWER
    if status == ray_probe.ASKS_FOR_NOTHING:
        raise EngineStartError(
            f"the Ray cluster at {address} asks for no token: start it with RAY_AUTH_MODE=token, "
            "or pass --allow-ray-without-token where only trusted programs reach it"
        )
    if status != ray_probe.ASKS_FOR_TOKEN:
        raise EngineStartError(f"there is no Ray cluster at {address}")
    if not has_token():
        raise EngineStartError(
            f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to the token of the cluster, which `ray get-auth-token` shows on its head node"
        )


def has_token() -> bool:
    """Whether Ray finds a token in the environment or in its file; newer versions send it by default."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return False
    return any(os.environ.get(name) for name in _TOKEN_VARIABLES) or _TOKEN_FILE.expanduser().is_file()


def cannot_join(address: str, error: Exception) -> str:
    """A sentence about an error of `ray.init`."""
    hint = "where it asks for a token, RAY_AUTH_MODE=token and the same token must be set here"
    return f"the Ray cluster at {address} cannot be joined ({type(error).__name__}); {hint}"


def join_cluster(flag: str, *, allow_without_token: bool) -> Any:
    """The module `ray`, connected to the cluster that the environment names. `flag` is the one that asked for it.

    Raises:
        EngineStartError: Ray is not installed, there is no cluster, or it asks for no token.
    """
    ray, address = import_ray(flag), cluster_address()
    if not allow_without_token:
        check_token(address)
    try:
        with own_signal_handlers():
            ray.init(address=address, namespace="llmstack", log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray has many kinds
        raise EngineStartError(cannot_join(address, error)) from error
    return ray


def import_ray(option: str) -> Any:
    """The package, which is an extra.

    Raises:
        EngineStartError: It is not installed; the text begins with the option that needs it.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ImportError as error:
        raise EngineStartError(f"{option} ray: pip install 'llmstack-parallel[ray]'") from error
    return ray
