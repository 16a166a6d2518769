"""An argument parser that names the nearest valid flag and reports all errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from llmstack_command.dotted import fold_dotted_flags
from llmstack_command.errors import CommandLineError, did_you_mean

USAGE_EXIT_CODE = 2
_MIN_ABBREVIATION = len("--xxx")  # shorter ones are typing errors more often
_SWITCH_VALUES = {"true": True, "false": False}
Check = Callable[[argparse.Namespace], Sequence[str]]


class CommandParser(argparse.ArgumentParser):
    """Raises `CommandLineError` instead of printing the usage and exiting, as argparse does."""

    def __init__(self, prog: str, description: str) -> None:
        # argparse asks for a formatter with each flag that is declared: one does for all.
        formatter = argparse.HelpFormatter(prog, width=80)
        self._declaring = lambda prog: formatter
        # Not argparse's abbreviations, which also take those of flags that `--help` does not show: see `_whole`.
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=self._declaring,
        )

    def parse_line(self, arguments: Sequence[str], check: Check | None = None) -> argparse.Namespace:
        """Parses all of `arguments`.

        `check`: Further errors of the parsed line, a sentence each.

        Raises:
            CommandLineError: Flags or values are wrong; the text has a line for each, with the nearest valid one.
        """
        try:
            line = fold_dotted_flags(self._respelt(normalise_flags(arguments)))
        except CommandLineError as error:
            self.error(str(error))
        topic = next((word for word in line[: _end_of_flags(line)] if word.startswith("--help=")), None)
        if topic is not None:
            print(self.help_about(topic.partition("=")[2]), end="")
            self.exit()
        namespace, unknown, problems = self._parse(line)
        flags = [word for word in unknown if word.startswith("-") and word != "--" and not _is_number(word)]
        # Other words may be the values of flags at fault.
        problems += [self._describe_unknown(word) for word in (flags if flags or problems else unknown)]
        if check is not None:
            problems += check(namespace)
        if problems:
            raise CommandLineError(
                "\n".join(problems), prog=self.prog, exit_code=getattr(namespace, "exit_code", USAGE_EXIT_CODE)
            )
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

    def _respelt(self, line: Sequence[str]) -> list[str]:
        """The line with flags in the place of those that only stand for them, and switches without their values.

        `--switch=true` and `--switch false`, which other programs take, become `--switch` and `--no-switch`.
        """
        respelt: list[str] = []
        words = iter(line)
        for word in words:
            flag, equals, value = word.partition("=")
            if word == "--":
                return [*respelt, word, *words]
            flag = self._whole(flag)
            action = self._option_string_actions.get(flag)
            if flag.lower() in _SWITCH_VALUES and respelt and self._is_switch(respelt[-1]):
                flag, equals, value = respelt.pop(), "=", flag
            if equals and value.lower() in _SWITCH_VALUES and self._is_switch(flag):
                respelt.append(flag if _SWITCH_VALUES[value.lower()] else _opposite(flag))
            else:
                respelt.append(getattr(action, "stands_for", flag) + equals + value)
        return respelt

    def _whole(self, flag: str) -> str:
        """The one flag that begins with these letters, as argparse abbreviates; else the flag as it is.

        A flag that is added later can make an abbreviation unclear, which is an error, but never changes its meaning.
        """
        names = self._option_string_actions
        if flag in names or len(flag) < _MIN_ABBREVIATION or not flag.startswith("--"):
            return flag
        found = [name for name in names if name.startswith(flag)]
        return found[0] if len({id(names[name]) for name in found}) == 1 else flag

    def _is_switch(self, flag: str) -> bool:
        """Whether a flag has no value, and a `--no-` form."""
        names = self._option_string_actions
        return flag in names and names[flag].nargs == 0 and _opposite(flag) in names

    def format_help(self) -> str:
        """The help, as wide as the terminal."""
        if self.formatter_class is self._declaring:
            self.formatter_class = argparse.HelpFormatter
        return super().format_help()

    def help_about(self, topic: str) -> str:
        """Help about `all` flags, about one group of flags, or about the flags whose names hold `topic`.

        Raises:
            CommandLineError: There is no such flag or group; the text lists the groups.
        """
        wanted = topic.lower().lstrip("-").replace("_", "-")
        if wanted == "all":
            return self.format_help()
        titled = [group for group in self._action_groups if group.title and group._group_actions]
        formatter = argparse.HelpFormatter(self.prog)
        groups = [
            group for group in titled if (group.title or "").lower().replace(" ", "-") == wanted.replace(" ", "-")
        ]
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        reasons: list[str] = []
        if not groups:
            found = [action for action in self._actions if any(wanted in name for name in action.option_strings)]
            formatter.add_arguments(found)
            reasons = [
                f"  {action.option_strings[0]}: {action.reason}\n" for action in found if hasattr(action, "reason")
            ]
        text = formatter.format_help() + "".join(reasons)
        if not text.strip() or not wanted:
            listed = ", ".join(sorted({group.title or "" for group in titled}))
            self.error(f"--help: no flag or group is named '{topic[:64]}'; groups are {listed}")
        return text

    def error(self, message: str) -> NoReturn:
        """Raises `message` as a `CommandLineError`."""
        raise CommandLineError(message, prog=self.prog)

    def _describe(self, error: argparse.ArgumentError) -> str:
        action = next((action for action in self._actions if _display_name(action) == error.argument_name), None)
        head, separator, tail = error.message.partition("invalid choice: ")
        if error.message.startswith("ignored explicit argument"):
            return f"{error.argument_name}: it takes no value"
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
        if flag in self._option_string_actions:
            return f"unexpected argument '{word}': nothing behind '--' is a flag"
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


def _opposite(flag: str) -> str:
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"


def _end_of_flags(line: Sequence[str]) -> int:
    return line.index("--") if "--" in line else len(line)


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
