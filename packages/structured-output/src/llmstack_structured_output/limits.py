"""Limits on the size of constraints and on the work for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on what a user may send; the defaults leave room for schemas of hundreds of properties.

    Attributes:
        max_schema_bytes: Size of a JSON schema or a structural tag, as UTF-8.
        max_depth: Nesting of arrays and objects in either.
        max_enum: Entries of one `enum`.
        max_patterns_together: Patterns of a schema that one string has to match. Few are cheap, 100 take minutes.
        max_regex_bytes: Size of a regular expression, also of one inside a schema.
        max_repeat: The largest number in a repetition such as `{2,1000}`.
        max_grammar_bytes: Size of a grammar in Lark's or GBNF's notation.
        max_choices: Strings to choose from.
        max_choice_bytes: Size of all choices together.
        lexer_fuel: Work that building the automata of one constraint may take; a million is about half a second.
        step_fuel: As `lexer_fuel`, for one token.
        max_step_items: Parser items that one token may add.
        max_row_items: Of those, such as go on side by side: alternatives that the text has not decided between.
        max_lexer_states: States of the automata, which are made as tokens need them.
        max_grammar_size: Symbols of the compiled grammar.
    """

    max_schema_bytes: int = 65_536
    max_depth: int = 48
    max_enum: int = 1_000
    max_patterns_together: int = 16
    max_regex_bytes: int = 8_192
    max_repeat: int = 1_000
    max_grammar_bytes: int = 32_768
    max_choices: int = 1_000
    max_choice_bytes: int = 65_536
    lexer_fuel: int = 1_000_000
    step_fuel: int = 200_000
    max_step_items: int = 50_000
    max_row_items: int = 8_000
    max_lexer_states: int = 50_000
    max_grammar_size: int = 200_000
