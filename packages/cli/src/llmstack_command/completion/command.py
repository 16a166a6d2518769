"""The subcommand `llmstack completion`; light, since `llmstack --help` imports it."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")

_EPILOG = """where the script goes:
  bash  llmstack completion bash > ~/.local/share/bash-completion/completions/llmstack
  zsh   llmstack completion zsh > "${fpath[1]}/_llmstack"
  fish  llmstack completion fish > ~/.config/fish/completions/llmstack.fish

Write it anew after an update: it holds the flags of the installed packages, and starts nothing when you press TAB."""


class CompletionCommand:
    """`llmstack completion bash|zsh|fish`."""

    name = "completion"
    help = "print a script that completes commands and flags in a shell"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the shell."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.add_argument("shell", choices=SHELLS)

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints the script."""
        from llmstack_command.completion.bash import bash_script
        from llmstack_command.completion.fish import fish_script
        from llmstack_command.completion.tree import describe_commands
        from llmstack_command.completion.zsh import zsh_script
        from llmstack_command.discovery import find_commands

        write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[namespace.shell]
        print(write(describe_commands(find_commands())), end="")
        return 0
