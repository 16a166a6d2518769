"""Context-free grammars in Lark and GBNF notation, and choices between strings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from llmstack_structured_output import errors
from llmstack_structured_output.lark import from_the_leaves, prepared, quote, unknown_name
from llmstack_structured_output.limits import GrammarLimits

_OF_THE_WHOLE = ("limit", "grammar too large", "too big", "too many", "exceed")
_NO_TOKENS: Mapping[str, int] = {}


def context_free_grammar(
    param: str,
    text: str,
    limits: GrammarLimits,
    special_tokens: Mapping[str, int] = _NO_TOKENS,
    tokenizer: LLTokenizer | None = None,
) -> str:
    """The grammar in either notation: GBNF's rules have `::=` and begin at `root`, Lark's `:` and begin at `start`.

    `special_tokens`: Names and ids of the tokens that a rule may have, such as `<|tool|>`.
    `tokenizer`: The one that the grammar is for; None for one with a token for each byte.

    Raises:
        InvalidRequestError: It cannot be read, or is over the limit.
    """
    if len(text.encode("utf-8", "replace")) > limits.max_grammar_bytes:
        raise errors.grammar_too_complex(param, f"it has more than {limits.max_grammar_bytes} bytes")
    try:
        lark = any_to_lark(text)
    except RecursionError as error:
        raise errors.grammar_too_complex(param, "it is nested too deeply") from error
    except Exception as error:  # the converter from GBNF raises bare `Exception` for what it cannot read
        raise errors.invalid_grammar(param, errors.one_line(str(error))) from error
    if (name := unknown_name(lark)) is not None:
        raise errors.invalid_grammar(param, f"unknown name: {name[:64]}")
    refuse = functools.partial(errors.invalid_grammar, param)
    written = prepared(lark, special_tokens, refuse)
    _check_from_the_leaves(param, written, tokenizer or LLTokenizer("byte"))
    return LLMatcher.grammar_from_lark(written)


def _check_from_the_leaves(param: str, lark: str, tokenizer: LLTokenizer) -> None:
    try:
        reordered = from_the_leaves(lark)
    except ValueError as error:
        raise errors.invalid_grammar(param, f"the terminal {str(error)[:64]} needs itself") from None
    if reordered is None:
        return
    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(reordered), tokenizer)
    # Rules are there twice, so that the limits of sizes are for the grammar itself.
    if message and not any(word in message for word in _OF_THE_WHOLE):
        raise errors.invalid_grammar(param, errors.one_line(message))


def choice_grammar(param: str, choices: Sequence[str], limits: GrammarLimits) -> str:
    """The grammar of exactly these strings, of which there is at least one and none is empty.

    Raises:
        InvalidRequestError: They are over a limit.
    """
    check_choices(param, choices, limits)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(quote, choices))}")


def check_choices(param: str, choices: Sequence[str], limits: GrammarLimits) -> None:
    """Checks the number of the strings and their size.

    Raises:
        InvalidRequestError: They are over a limit.
    """
    if len(choices) > limits.max_choices:
        raise errors.grammar_too_complex(param, f"it has more than {limits.max_choices} strings")
    if sum(len(choice.encode("utf-8", "replace")) for choice in choices) > limits.max_choice_bytes:
        raise errors.grammar_too_complex(param, f"its strings have more than {limits.max_choice_bytes} bytes together")
