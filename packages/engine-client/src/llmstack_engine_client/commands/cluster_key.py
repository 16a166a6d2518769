"""The subcommand `llmstack cluster-key`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmstack_types import EngineStartError


class ClusterKeyCommand:
    """The subcommand `llmstack cluster-key FILE`: makes or replaces the keys that the machines of an endpoint share."""

    name = "cluster-key"
    help = "make the key file that the machines of one endpoint share"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the file, and the steps of a replacement."""
        parser.add_argument("file", type=Path, metavar="FILE", help="key file; only its owner can read it")
        step = parser.add_mutually_exclusive_group()
        step.add_argument(
            "--add", action="store_true", help="add a second pair of keys, which is accepted but not used yet"
        )
        step.add_argument("--switch", action="store_true", help="use the second pair; the first one stays accepted")
        step.add_argument("--retire", action="store_true", help="remove the second pair")

    def run(self, namespace: argparse.Namespace) -> int:
        """Writes the file; shows no key."""
        try:
            sys.stdout.write(f"{_write(namespace)}\n")
        except EngineStartError as error:
            sys.stderr.write(f"llmstack cluster-key: error: {error}\n")
            return 1
        return 0


def _write(namespace: argparse.Namespace) -> str:
    import zmq  # late: `--help` needs nothing

    from llmstack_engine_core.ipc.keys import make_key_file, read_keys, replace_keys

    path: Path = namespace.file
    if not (namespace.add or namespace.switch or namespace.retire):
        if not make_key_file(path):
            raise EngineStartError(f"{path} exists; replace its keys by --add, --switch and --retire, in this order")
        return f"{path}: one pair of keys; copy it to every machine"
    pairs = read_keys(path).pairs
    if namespace.add == (len(pairs) == 2):
        raise EngineStartError(f"{path} has {'two pairs' if namespace.add else 'one pair'} of keys")
    if namespace.add:
        replace_keys(path, (pairs[0], zmq.curve_keypair()))
        return f"{path}: a second pair is accepted; copy it to every machine and start them again, then --switch"
    if namespace.switch:
        replace_keys(path, (pairs[1], pairs[0]))
        return f"{path}: the second pair is in use; copy it to every machine and start them again, then --retire"
    replace_keys(path, pairs[:1])
    return f"{path}: one pair of keys; copy it to every machine and start them again"
