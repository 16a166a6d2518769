"""Error sentences about options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llmstack_types import LLMStackError

Naming = Callable[[str], str]
"""A function from an option's field to the user's name of it: a keyword, a flag, a variable."""


def keyword(name: str) -> str:
    """The naming of Python code: fields are keywords."""
    return name


class Problem:
    """One sentence: `{block_size}` stands for that option's name, `values` for everything else in braces."""

    def __init__(self, text: str, /, **values: object) -> None:
        self.text = text
        self.values = values

    def named(self, naming: Naming) -> str:
        """The sentence with the names that the user knows."""
        return self.text.format_map(_Names(naming, self.values))


class OptionsError(LLMStackError, ValueError):
    """Options are out of range or contradict each other; the text has a line for each problem."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(
            Problem("{text}", text=problem) if isinstance(problem, str) else problem for problem in problems
        )
        super().__init__("\n".join(self.lines()))

    def lines(self, naming: Naming = keyword) -> list[str]:
        """A sentence for each problem."""
        return [problem.named(naming) for problem in self.problems]


def values_problems(named: Iterable[tuple[str, str]]) -> list[Problem]:
    """Problems of single options: pairs of a field and the reason."""
    return [Problem(f"{{{name}}}: {{reason}}", reason=reason) for name, reason in named]


class _Names(dict[str, object]):
    def __init__(self, naming: Naming, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self._naming = naming

    def __missing__(self, key: str) -> str:
        return self._naming(key)
