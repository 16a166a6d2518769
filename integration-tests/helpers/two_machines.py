"""Two machines with a cable between them, as network namespaces of this one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

FIRST, OTHER = "10.77.0.1", "10.77.0.2"
# In namespaces of its own: two machines with a cable between them, without an open port anywhere.
SET_UP = f"""
mount -t tmpfs none /run &&
ip netns add first && ip netns add other &&
ip link add cable netns first type veth peer name cable netns other &&
for place in first other; do ip -n $place link set lo up; ip -n $place link set cable up; done &&
ip -n first address add {FIRST}/24 dev cable && ip -n other address add {OTHER}/24 dev cable &&
echo ready && exec cat
"""


class Namespaces:
    """Two machines as network namespaces, which need no privileges and end with this object."""

    first, address = ("first",), FIRST

    def __init__(self) -> None:
        if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
            pytest.skip("needs the commands unshare, nsenter and ip")
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", SET_UP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            pytest.skip("this machine forbids network namespaces")

    def prefix(self, machine: str) -> list[str]:
        return [*self._enter(), "ip", "netns", "exec", machine]

    def set_cable(self, state: str) -> None:
        subprocess.run([*self._enter(), "ip", "-n", "other", "link", "set", "cable", state], check=True)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._holder.pid}", "--user", "--net", "--mount", "--preserve-credentials"]

    def close(self) -> None:
        self._holder.communicate(timeout=10)  # closes its input, which ends it
