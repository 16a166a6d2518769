"""Word list of the project: expressions that readers stumble over, and what to write instead.

`tools/check_prose.py` refuses each of them in docs, docstrings, comments, messages and names, and writes the table of
docs/glossary.md from this one. A pattern is matched without regard to case, and a space in it matches a line break too.
In names, `_` and capitals count as spaces: `turned_keys` is "turned keys".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expression:
    """What is refused: `pattern` finds it, the glossary shows it as `shown`, and `instead` names better words."""

    shown: str
    pattern: str
    instead: str


_PARTS_OF_A_HEAD = r"keys?|queries|query|heads?|halves|pairs|dimensions?|q|k"

WORD_LIST = (
    Expression(
        "by the door, at the door, what goes in by",
        r"\b(?:at|by|through|in|passes) (?:the |its )?(?:same |one )?door\b|\b(?:the )?one door\b|\bgo(?:es)? in by\b"
        r"|\bcomes? by (?:its|their) blocks\b|\bentrance\b",
        "validation, admission, allocation plan",
    ),
    Expression(
        "recording, recorded step (of a GPU or of native calls)",
        r"(?<!\bterminal\s)(?<!\bis\s)(?<!\bstep\s)\brecordings?\b|\brecorded and repeated\b"
        r"|(?<!\bnum\s)\brecorded (?:decode )?(?:steps?|decodes?|graphs?|calls?)\b"
        r"|\b(?:graphs?|steps) (?:is|are|was|were) recorded\b",
        "graph capture, captured graph, captured step; of the step log: step log, log",
    ),
    Expression(
        "turn (of keys and queries)",
        rf"\b(?:un)?turned (?:by|together|dimensions?|{_PARTS_OF_A_HEAD})\b"
        rf"|\bturns? (?:and attend|dimensions|pairs|(?:the |every |each |a )?(?:{_PARTS_OF_A_HEAD}))\b"
        rf"|\b(?:{_PARTS_OF_A_HEAD}|part of each head|a part|of it|of which a part|nothing) (?:is |are )?turned\b"
        r"|^turned$",
        "rotate, apply RoPE; rotated",
    ),
    Expression(
        "bar, barred (of tokens)",
        r"\bbarred\b|\bbarring\b|\bbars (?:what|the|it|them|its|their|tokens?|ids?|all|every|nothing)\b"
        r"|\b(?:to|that|would|must|words that) bar (?:a|an|the|it|its|them|tokens?|ids?|in|nothing)\b"
        r"|\bmin tokens bars\b|\bsampler bars\b",
        "mask, masked",
    ),
    Expression("first maximum", r"\bfirst maxim(?:um|a)\b", "argmax"),
    Expression("told, is told", r"\btold\b", "receives, is notified; told apart: distinguished"),
    Expression("hear, hears of", r"\bhears?\b|\bheard\b", "receives, is notified of"),
    Expression(
        "bring, brings, brought",
        r"\bbrings?\b(?!\sup\b)|\bbringing\b(?!\sup\b)|\bbrought\b(?!\sup\b)",
        "returns, carries, contains, adds, installs",
    ),
    Expression(
        "take over, takes over", r"\btak(?:es?|en|ing) over\b|\btook over\b", "applies, copies, adopts, replaces"
    ),
    Expression("stand around, standing around one", r"\b(?:stands?|standing|stood) around\b", "wraps, decorates"),
    Expression("promises, keeps promises", r"\bpromises?\b", "starvation guard, invariant, guarantee"),
    Expression("kinship", r"\bkinship\b", "fork lineage"),
    Expression("twin", r"\btwins?\b", "of a device: CPU stand-in, simulator; of a kernel: reference"),
    Expression("a crash is a pause", r"\bcrash is a pause\b", "crash recovery"),
    Expression("take one layer", r"\btak(?:e|ing) one layer\b", "use one package alone"),
    Expression("seen from outside", r"\bseen from outside\b", "observability"),
    Expression(
        "headless (of a model)",
        r"\bheadless (?:models?|checkpoints?|architectures?|decoders?|classes)\b|\bmake headless\b|\bload headless\b",
        "without an LM head; headless is the server without HTTP",
    ),
    Expression(
        "Likewise. / Yes. (as a sentence)",
        r"\blikewise\.|(?:^|[.:;] )yes\.",
        "say what is true, or leave the docstring out",
    ),
    Expression("Row 13. (of the error table)", r"^rows? \d+(?:(?:,| and) \d+)*\b(?!\sof\b)", "the status and the code"),
    Expression(
        "die of, what kills engine cores",
        r"\b(?:die|dies|died) of\b",
        "crash on; the request that crashes the engine core",
    ),
    Expression(
        "take what is left over",
        r"\btakes? what (?:is left|(?:the )?neighbours leave)\b|\bleave over\b",
        "use the remaining budget",
    ),
    Expression(
        "come back (of a request)", r"\b(?:comes?|came|coming) back\b", "is resumed, is scheduled again; is returned"
    ),
    Expression(
        "nobody, somebody, everybody, whoever",
        r"\b(?:nobody|somebody|everybody|anybody|whoever|whom)\b",
        "the noun: no request, another process, the caller",
    ),
    Expression("anew", r"\banew\b", "again"),
    Expression("at hand", r"\bat hand\b", "available"),
    Expression(
        "choice reader, begins open, keeps promises (names)",
        r"\bchoice readers?\b|\bbegins open\b",
        "a noun of the field",
    ),
)
