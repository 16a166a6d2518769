"""An argument parser that names the nearest valid flag and reports all errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from llmstack_command.dotted import fold_dotted_flags
from llmstack_command.errors import CommandLineError, did_you_mean

Check = Callable[[argparse.Namespace], Sequence[str]]


class CommandParser(argparse.ArgumentParser):
    """Raises `CommandLineError` instead of printing the usage and exiting, as argparse does."""

    def __init__(self, prog: str, description: str) -> None:
        # No abbreviations: a flag added later must not change what an old command line means.
        super().__init__(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)

    def parse_line(self, arguments: Sequence[str], check: Check | None = None) -> argparse.Namespace:
        """Parses all of `arguments`.

        `check`: What else is wrong with the parsed line, a sentence each.

        Raises:
            CommandLineError: Flags or values are wrong; the text has a line for each, with the nearest valid one.
        """
        try:
            line = fold_dotted_flags(normalise_flags(arguments))
        except CommandLineError as error:
            self.error(str(error))
        namespace, unknown, problems = self._parse(line)
        flags = [word for word in unknown if word.startswith("-") and not _is_number(word)]
        # Other words may be the values of flags at fault.
        problems += [self._describe_unknown(word) for word in (flags if flags or problems else unknown)]
        if check is not None:
            problems += check(namespace)
        if problems:
            self.error("\n".join(problems))
        return namespace

    def _parse(self, line: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """The namespace, the unknown words, and what is wrong with flags that are left out of the namespace."""
        problems: list[str] = []
        while True:
            try:
                return *self.parse_known_args(line), problems
            except CommandLineError:  # what is required, and may only be left out here
                if not problems:
                    raise
                self.error("\n".join(problems))
            except argparse.ArgumentError as error:
                problems.append(self._describe(error))
                names = (error.argument_name or "").split("/")
                rest = [word for word in line if word.partition("=")[0] not in names]
                if len(rest) == len(line):  # a positional, without which the rest is unknown
                    self.error("\n".join(problems))
                line = rest

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
    """`--max_model_len=4` becomes `--max-model-len=4`; values, keys after a dot and words after `--` stay."""
    normalised = list(arguments)
    for index, word in enumerate(arguments):
        if word == "--":
            break
        if word.startswith("--"):
            flag = word.partition("=")[0].partition(".")[0]
            normalised[index] = flag.replace("_", "-") + word[len(flag) :]
    return normalised


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _display_name(action: argparse.Action) -> str | None:
    """The name of the argument in errors of argparse."""
    if action.option_strings:
        return "/".join(action.option_strings)
    return action.metavar if isinstance(action.metavar, str) else action.dest
