"""Long grammars: their errors are found from the leaves on."""

from __future__ import annotations

import pytest

from llmstack_structured_output import GrammarCompiler
from llmstack_structured_output.lark import from_the_leaves
from llmstack_types import InvalidRequestError, StructuredOutputsParams

NUM_RULES = 1500


def chain(last: str, name: str = "r") -> str:
    """Rules that need each other one after the other, and the body of the last one."""
    rules = [f'{name}{number}: "a" {name}{number + 1}' for number in range(NUM_RULES)]
    return "\n".join([f"start: {name}0", *rules, f"{name}{NUM_RULES}: {last}"])


# The library takes half a minute for each of them.
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (chain("other{1,2}"), "unknown name: .other"),
        (chain("[other]"), "unknown name: .other"),
        (chain("/(/"), "unclosed group"),
        (chain("/(?=a)b/", "T"), "look-around"),
        (chain("<[99999999]>"), "Token range end too large"),
        (chain('"z".."a"'), "invalid range order"),
        (chain('"a"{5,2}'), "range end must be >= start"),
        (chain("r0\nr0: /x/", "T"), "unknown name: .r0"),
        (chain("T0", "T"), "the terminal T0 needs itself"),
    ],
    ids=range(9),
)
def test_an_error_behind_many_rules_is_found(compiler: GrammarCompiler, grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compiler.compile(StructuredOutputsParams(grammar=grammar))
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("last", ['"b"', "r3 | /x/", 'start? "start" /start/'])
def test_many_rules_without_an_error_compile(compiler: GrammarCompiler, last: str) -> None:
    matcher = compiler.compile(StructuredOutputsParams(grammar=chain(last))).new_matcher()
    assert matcher.accept(b"a" * NUM_RULES)


def test_each_rule_comes_after_those_that_it_needs() -> None:
    rules = [
        f"r{n}: {' | '.join(f'r{m}' for m in {2 * n, 2 * n + 1, n * n % 7 + n + 1} if n < m < 99)}" for n in range(99)
    ]
    grammar = "\n".join([*(f'{rule} "start"' for rule in rules), "start: r1 r3", "unused: other"])
    reordered = from_the_leaves(grammar)
    assert reordered is not None
    assert reordered.count('"start"') == 99
    order = reordered.rpartition("start: ")[2].split(" | ")
    order = [name.strip() for name in order]
    assert order[-1] == "start_of_the_user"
    assert "unused" not in order
    for number in range(1, 99):
        needed = rules[number].partition(": ")[2].split(" | ")
        if f"r{number}" in order:
            assert all(order.index(name) < order.index(f"r{number}") for name in needed if name)


def test_short_grammars_and_those_with_inner_ones_are_left_as_they_are() -> None:
    assert from_the_leaves("start: a\na: b") is None
    assert from_the_leaves(chain('%lark { start: "x" }')) is None
