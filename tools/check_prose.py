"""Refuses prose that readers stumble over: banned expressions, long first lines, empty docstrings, long sentences.

    python tools/check_prose.py                        everything under CHECKED
    python tools/check_prose.py packages/kernels ...   only these files and folders
    python tools/check_prose.py --write-glossary       writes the table of docs/glossary.md from tools/word_list.py

Every complaint is `path:line: what is wrong`, sorted; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from word_list import WORD_LIST, Expression

ROOT = Path(__file__).resolve().parent.parent
CHECKED: tuple[str, ...] = (
    ".github",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "conftest.py",
    "docs",
    "integration-tests",
    "packages",
    "tools",
)
MAX_FIRST_LINE = 80
MIN_DOCSTRING_WORDS = 4
MAX_SENTENCE_WORDS = 25
# A reader of the docstring alone does not know what these stand for.
PRONOUNS = re.compile(
    r"(?:What|Those|That|From now on|So many|How many|It is|Of (?:each|the|an?|all|which|several)"
    r"|The same(?:,| (?:of|in|for|with|between|from|under|on|as|after|before)\b))\b"
)
# History stays as it was written, and the word list has to name what it bans.
NOT_PROSE = ("CHANGELOG.md", "word_list.py", "test_check_prose.py")
GLOSSARY = ROOT / "docs" / "glossary.md"
BEGIN, END = "<!-- word list: begin -->\n", "<!-- word list: end -->\n"


class Prose:
    """One text and the line that it starts on."""

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.line = line

    def line_of(self, position: int) -> int:
        """The line of a position in the text."""
        return self.line + self.text.count("\n", 0, position)


# The word list


@cache
def patterns() -> tuple[tuple[Expression, re.Pattern[str]], ...]:
    """The compiled word list; a space matches line breaks and what indents or comments the next line."""
    return tuple((entry, re.compile(entry.pattern.replace(" ", r"[\s#]+"), re.IGNORECASE)) for entry in WORD_LIST)


@cache
def any_pattern() -> re.Pattern[str]:
    """All patterns as one, to skip the texts that none matches. Each begins at a word, or at the end of a sentence."""
    where = r"(?:\b(?=\w)|(?=[.:;]))"  # trying all of them at every character takes three times as long
    return re.compile(f"{where}(?:{'|'.join(pattern.pattern for _, pattern in patterns())})", re.IGNORECASE)


def without_code(text: str) -> str:
    """The text with `inline code` and addresses blanked out, at the same length."""
    return re.sub(r"`[^`\n]+`|\bhttps?://\S+", lambda match: "_" * len(match[0]), text)


def banned_in(prose: Prose) -> Iterator[tuple[int, str]]:
    """Complaints about the banned expressions of one text."""
    text = without_code(prose.text)
    if any_pattern().search(text) is None:
        return
    for entry, pattern in patterns():
        for match in pattern.finditer(text):
            found = " ".join(match[0].replace("#", " ").split()).strip(".:; ")
            yield prose.line_of(match.start()), f'"{found}": write {entry.instead}'


def as_words(name: str) -> str:
    """A name as prose: `_turnedKeys` is `turned keys`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").strip().lower()


@cache
def banned_in_name(name: str) -> tuple[str, ...]:
    """Complaints about one name."""
    return tuple(complaint for _, complaint in banned_in(Prose(as_words(name), 1)))


# Python files


def python_complaints(text: str, is_source: bool, is_test: bool) -> Iterator[tuple[int, str]]:
    """Complaints about one Python file.

    Args:
        text: The file.
        is_source: The file belongs to a wheel, so the rules for docstrings apply.
        is_test: Strings are data rather than messages, and are not looked at.
    """
    tree = ast.parse(text)
    documented = docstrings(tree)
    for prose in documented.values():
        yield from banned_in(prose)
    for prose in comments(text):
        yield from banned_in(prose)
    for line, name in set(defined_names(tree)):
        for complaint in banned_in_name(name):
            yield line, f"name {name!r}: {complaint}"
    if not is_test:
        for prose in messages(tree, set(documented)):
            yield from banned_in(prose)
    if is_source:
        yield from docstring_complaints(tree, documented)


def docstrings(tree: ast.Module) -> dict[ast.AST, Prose]:
    """The docstrings of a module, by the node of their text."""
    found: dict[ast.AST, Prose] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            text = first.value if isinstance(first, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[text] = Prose(text.value, first.lineno)
    return found


def docstring_complaints(tree: ast.Module, documented: dict[ast.AST, Prose]) -> Iterator[tuple[int, str]]:
    """Complaints about the length and the beginning of docstrings, and about the module's first line."""
    for prose in documented.values():
        if (pronoun := PRONOUNS.match(prose.text.strip())) is not None:
            yield prose.line, f'docstring "{pronoun[0]} ...": begin with the noun that this stands for, or with a verb'
        if len(prose.text.split()) < MIN_DOCSTRING_WORDS:
            yield prose.line, f'docstring "{prose.text.strip()}": say something or leave it out'
    if tree.body and isinstance(tree.body[0], ast.Expr) and tree.body[0].value in documented:
        first = documented[tree.body[0].value]
        paragraph = first.text.strip().split("\n\n")[0]
        if "\n" in paragraph or len(paragraph) > MAX_FIRST_LINE:
            yield first.line, f"the module's docstring starts with one line of at most {MAX_FIRST_LINE} characters"


def comments(text: str) -> Iterator[Prose]:
    """Comments, those on consecutive lines as one text."""
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        whole = line.lstrip().startswith("#")
        trailing = None if whole else re.search(r"\S  # (.*)$", line)
        if whole:
            start = start if block else number
            block.append(line.strip())
        elif block:
            yield Prose("\n".join(block), start)
            block = []
        if trailing is not None:
            yield Prose(trailing[1], number)


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that the file gives: functions, classes, parameters, variables, attributes. Names it uses are others'."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def messages(tree: ast.Module, documented: set[ast.AST]) -> Iterator[Prose]:
    """String constants of more than one word that are no docstrings; placeholders of f-strings are blanks."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):  # parents come first, so that an f-string's parts are known when they are met
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield Prose("".join(parts).replace("\n", " "), node.lineno)
        elif isinstance(node, ast.Constant) and node not in inside and node not in documented:
            text = node.value if isinstance(node.value, str) else ""
            if " " in text.strip():
                yield Prose(text.replace("\n", " "), node.lineno)


# Markdown files


def markdown_complaints(text: str) -> Iterator[tuple[int, str]]:
    """Complaints about one Markdown file."""
    without_list = re.sub(f"{BEGIN}.*?{END}", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    for is_table, prose in blocks(without_list):
        yield from banned_in(prose)
        if not is_table:
            yield from sentence_complaints(prose)


def blocks(text: str) -> Iterator[tuple[bool, Prose]]:
    """Paragraphs, list items, headings and table rows, with whether it is a table row; code is left out."""
    paragraph: list[str] = []
    start = 0
    fence = ""
    is_list = False
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        marker = re.match(r"\s*(`{3,}|~{3,})", line)
        is_code = bool(fence) or (line.startswith("    ") and not paragraph and not is_list)
        if marker is not None and (not fence or marker[1].startswith(fence)):
            fence, is_code = ("" if fence else marker[1]), True
        content = line.strip()
        begins = re.match(r"([-*+]|\d+\.|#+|!!!|\?\?\?|===|:) ", content) or content.startswith(("|", "<"))
        if paragraph and (not content or is_code or begins):
            yield paragraph[0].startswith("|"), Prose("\n".join(paragraph), start)
            paragraph = []
        if content and not is_code and not re.fullmatch(r"[-=|: ]+|<!--.*-->|\[[^]]+\]: \S+", content):
            start = start if paragraph else number
            is_list = re.match(r"([-*+]|\d+\.|!!!|\?\?\?|===) ", content) is not None or (
                is_list and line.startswith("  ")
            )
            paragraph.append(re.sub(r"^([-*+]|\d+\.|#+|!!!|\?\?\?|===|:) ", "", content))


def sentence_complaints(prose: Prose) -> Iterator[tuple[int, str]]:
    """Complaints about the sentences of one paragraph that have too many words."""
    text = re.sub(r"!?\[([^]]*)\]\([^)\s]*\)", r"\1", prose.text)  # of a link, its text
    text = re.sub(r"`[^`]+`", "Code", re.sub(r"<[^>\n]+>", "", text))  # code is one word
    text = re.sub(r"\b(e\.g|i\.e|vs|cf|etc)\.", r"\1", text)
    for sentence in re.split(r"(?<=[.!?…])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9])", text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > MAX_SENTENCE_WORDS:
            opening = " ".join(words[:6])
            yield prose.line, f'a sentence of {len(words)} words, {MAX_SENTENCE_WORDS} at most: "{opening} …"'


# The glossary


def glossary_table() -> str:
    """The table of docs/glossary.md."""
    rows = (f"| {entry.shown} | {entry.instead} |\n".replace("\\", "") for entry in WORD_LIST)
    return "".join(["| instead of | write |\n|---|---|\n", *rows])


def with_glossary_table(page: str) -> str:
    """The page with the table between its two marks written from the word list."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{glossary_table()}{END}{tail}"


# The command


def file_complaints(path: Path, root: Path) -> list[str]:
    """Complaints about one file, by line."""
    text = path.read_text(encoding="utf-8")
    where = path.relative_to(root)
    if path.suffix == ".md":
        found = set(markdown_complaints(text))
    else:
        folders = {"tests", "benchmarks", "integration-tests", "train"}
        is_test = bool(folders & set(where.parts)) or path.name == "conftest.py"
        found = set(python_complaints(text, is_source="src" in where.parts, is_test=is_test))
    return [f"{where}:{line}: {complaint}" for line, complaint in sorted(found)]


def files_of(names: Iterable[str], root: Path) -> list[Path]:
    """The files with prose among `names` and, for folders, below them. Unknown names raise FileNotFoundError."""
    found: set[Path] = set()
    for name in names:
        place = (root / name).resolve()
        if not place.exists():
            raise FileNotFoundError(f"{name} is listed and does not exist")
        found.update([place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")])
    return sorted(path for path in found if path.name not in NOT_PROSE and "demo_model/model" not in path.as_posix())


def glossary_complaints() -> list[str]:
    """One complaint if the table of docs/glossary.md is not the word list's."""
    page = GLOSSARY.read_text(encoding="utf-8")
    fault = "not as tools/word_list.py says; run python tools/check_prose.py --write-glossary"
    return [] if with_glossary_table(page) == page else [f"docs/glossary.md:1: {fault}"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the prose of files and folders, by default those in CHECKED.")
    parser.add_argument("paths", nargs="*", help="files and folders, relative to the root")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the paths start")
    parser.add_argument("--write-glossary", action="store_true", help="write the table of docs/glossary.md")
    options = parser.parse_args()
    if options.write_glossary:
        GLOSSARY.write_text(with_glossary_table(GLOSSARY.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    root = options.root.resolve()
    files = files_of(options.paths or CHECKED, root)
    found = glossary_complaints() + [complaint for path in files for complaint in file_complaints(path, root)]
    print("\n".join(found) if found else f"prose: {len(files)} files follow the word list")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
