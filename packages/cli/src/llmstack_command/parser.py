"""An argument parser that names the nearest valid flag or value, and takes `_` for `-` in flags."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from llmstack_command.dotted import fold_dotted_flags
from llmstack_command.errors import CommandLineError
from llmstack_command.settings_file import words_of_files


class CommandParser(argparse.ArgumentParser):
    """Raises `CommandLineError` where argparse would print its usage and exit."""

    def __init__(self, prog: str, description: str) -> None:
        # No abbreviations: a flag added later must not change what an old command line means.
        super().__init__(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)

    def parse_line(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses all of `arguments`.

        Raises:
            CommandLineError: A flag or a value is wrong; the one-line text names it and the nearest valid one.
        """
        try:
            namespace, unknown = self.parse_known_args(self._folded(arguments))
        except argparse.ArgumentError as error:
            self.error(self._describe(error))
        if unknown:
            self.error(self._describe_unknown(unknown[0]))
        return namespace

    def _folded(self, arguments: Sequence[str]) -> list[str]:
        line = normalise_flags(arguments)
        try:
            # In front, and only what the line does not say itself.
            return fold_dotted_flags([*words_of_files(self._actions, self._option_string_actions, line), *line])
        except CommandLineError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Raises `message` as a `CommandLineError`."""
        raise CommandLineError(message, prog=self.prog)

    def _describe(self, error: argparse.ArgumentError) -> str:
        action = next((action for action in self._actions if _display_name(action) == error.argument_name), None)
        head, separator, tail = error.message.partition("invalid choice: ")
        if action is None or action.choices is None or not separator or head:
            return f"{error.argument_name}: {error.message}"
        value = tail.partition(" (choose from")[0].strip("'")
        choices = [str(choice) for choice in action.choices]
        suggestion = did_you_mean(value, choices) or f"; choose from {', '.join(choices)}"
        return f"{error.argument_name}: invalid value '{value}'{suggestion}"

    def _describe_unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument '{word}'"
        flag = word.partition("=")[0]
        return f"unknown flag '{flag}'{did_you_mean(flag, self._shown_flags()) or f'; see {self.prog} --help'}"

    def _shown_flags(self) -> list[str]:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [option for action in shown for option in action.option_strings]


def normalise_flags(arguments: Sequence[str]) -> list[str]:
    """`--max_model_len=4` becomes `--max-model-len=4`; values, keys behind a dot and what follows `--` stay."""
    normalised = list(arguments)
    for index, word in enumerate(arguments):
        if word == "--":
            break
        if word.startswith("--"):
            flag = word.partition("=")[0].partition(".")[0]
            normalised[index] = flag.replace("_", "-") + word[len(flag) :]
    return normalised


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the candidate nearest to `word`, or nothing where none is near."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def _display_name(action: argparse.Action) -> str | None:
    """The name argparse puts into its errors."""
    if action.option_strings:
        return "/".join(action.option_strings)
    return action.metavar if isinstance(action.metavar, str) else action.dest
