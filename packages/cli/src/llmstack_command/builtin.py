"""The subcommands `versions`, `doctor`, `collect-env` and `completion`."""

from __future__ import annotations

import argparse
import sys

SHELLS = ("bash", "zsh", "fish")

_COMPLETION_EPILOG = """install the script:
  bash  llmstack completion bash > ~/.local/share/bash-completion/completions/llmstack
  zsh   llmstack completion zsh > "${fpath[1]}/_llmstack"
  fish  llmstack completion fish > ~/.config/fish/completions/llmstack.fish

Run this again after an update: the script lists the flags of the installed packages and starts no process."""


def command_version() -> str:
    """Version of the `llmstack-command` distribution; `source` if it runs without being installed."""
    import importlib.metadata  # late: it takes longer than all else before a command runs

    try:
        return importlib.metadata.version("llmstack-command")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def installed_versions() -> dict[str, str]:
    """Name to version of every installed distribution of the stack, sorted by name."""
    import importlib.metadata

    pairs = (
        (distribution.metadata["Name"], distribution.version) for distribution in importlib.metadata.distributions()
    )
    return dict(sorted((name, version) for name, version in pairs if name and name.startswith("llmstack-")))


class VersionsCommand:
    """Versions of the installed packages, for bug reports."""

    name = "versions"
    help = "list the installed packages of the stack and their versions"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares no flags: the command has none."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints one `name version` line each."""
        import platform  # late: every command line imports this module

        lines = [f"{name} {version}" for name, version in installed_versions().items()]
        lines.append(f"python {platform.python_version()} ({sys.platform})")
        print("\n".join(lines))
        return 0


class CollectEnvCommand:
    """Description of the machine and its software, for bug reports."""

    name = "collect-env"
    help = "describe this machine and its software, for a bug report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints the report. Facts that are not available are left out, or give the reason."""
        import json

        from llmstack_command.collect_env.report import collect, render

        sections = collect()
        print(json.dumps(sections, indent=2) if namespace.json else render(sections))
        return 0


class DoctorCommand:
    """Checks of this machine, each with its remedy."""

    name = "doctor"
    help = "check whether this machine can serve, and say what to do where it cannot"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", nargs="?", metavar="MODEL", help="the model to serve, as after `llmstack serve`")
        parser.add_argument("--host", metavar="ADDRESS", help="the address to listen on")
        parser.add_argument("--port", metavar="N", help="the port to listen on")
        parser.add_argument("--state-dir", metavar="DIR", help="the folder of the server's state")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints the findings; returns 1 if something prevents serving."""
        import json

        from llmstack_command.doctor.report import collect, render

        flags = {"--host": namespace.host, "--port": namespace.port, "--state-dir": namespace.state_dir}
        words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
        findings = collect([*words, *([namespace.model] if namespace.model else [])])
        print(json.dumps([one.as_dict() for one in findings], indent=2) if namespace.json else render(findings))
        return 1 if any(one.state == "problem" for one in findings) else 0


class CompletionCommand:
    """Completion scripts for bash, zsh and fish."""

    name = "completion"
    help = "print a script that completes commands and flags in a shell"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _COMPLETION_EPILOG
        parser.add_argument("shell", choices=SHELLS)

    def run(self, namespace: argparse.Namespace) -> int:
        from llmstack_command.completion.bash import bash_script
        from llmstack_command.completion.fish import fish_script
        from llmstack_command.completion.tree import describe_commands
        from llmstack_command.completion.zsh import zsh_script
        from llmstack_command.discovery import find_commands

        write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[namespace.shell]
        print(write(describe_commands(find_commands())), end="")
        return 0
