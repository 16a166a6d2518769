"""The subcommands that need no other package."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys


def command_version() -> str:
    """Version of the `llmstack-command` distribution; `source` where it runs without being installed."""
    try:
        return importlib.metadata.version("llmstack-command")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def installed_versions() -> dict[str, str]:
    """Name to version of every installed distribution of the stack, sorted by name."""
    pairs = (
        (distribution.metadata["Name"], distribution.version) for distribution in importlib.metadata.distributions()
    )
    return dict(sorted((name, version) for name, version in pairs if name and name.startswith("llmstack-")))


class VersionsCommand:
    """`llmstack versions`: what a report of a fault should name."""

    name = "versions"
    help = "list the installed packages of the stack and their versions"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """There are none."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints one `name version` line each."""
        lines = [f"{name} {version}" for name, version in installed_versions().items()]
        lines.append(f"python {platform.python_version()} ({sys.platform})")
        print("\n".join(lines))
        return 0
