"""Reads plain-text story books and returns clean sections made of unwrapped, uniformly quoted paragraphs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# First and last line of the stories proper in the books the demo model was trained on; other files are taken whole.
BOUNDS = {
    "alice_in_wonderland": ("CHAPTER I. Down the Rabbit-Hole", "THE END"),
    "andersen_fairy_tales": ("THE EMPEROR'S NEW CLOTHES", ""),
    "blue_fairy_book": ("THE BRONZE RING", ""),
    "english_fairy_tales": ("TOM TIT TOT", "OYEZ-OYEZ-OYEZ"),
    "grimm_fairy_tales": ("THE GOLDEN BIRD", "The Brothers Grimm, Jacob"),
    "jungle_book": ("Mowgli", ""),
    "marvelous_land_of_oz": ("In the Country of the Gillikins", ""),
    "peter_pan": ("All children, except one", "THE END"),
    "secret_garden": ("CHAPTER I", "THE END"),
    "wizard_of_oz": ("1.  The Cyclone", ""),
    "yellow_fairy_book": ("THE CAT AND THE MOUSE", ""),
}
GUTENBERG_MARK = re.compile(r"^\*\*\* ?(START|END) OF .*$", re.MULTILINE)
FOOTNOTE = re.compile(r"^\(\d+\)\s")
FOOTNOTE_REFERENCE = re.compile(r"\s?\(\d{1,2}\)")
PAGE_FURNITURE = re.compile(r"^\d+(\s+.*(drawing|illustration).*)?$|^[\s*_.-]+$|^\[.*\]$|^THE END\.?$", re.IGNORECASE)
CHAPTER = re.compile(r"^(chapter\b|Chapter\b|CHAPTER\b|[IVXLC]+\. |\d+\. )")
# Words of their time that a storyteller should not learn to say; paragraphs with them are left out.
UNKIND = re.compile(
    r"nigger|negro|redskin|piccaninn|blackamoor|squaw|\bjews?\b|\bgips(y|ies)|savages|heathen|\bblacks\b|\brape|"
    r"\bwhip(ped|ping)? (him|her|them)\b|cut off (his|her|their) heads?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Section:
    """One tale or chapter: the book it is from and its paragraphs in order."""

    book: str
    paragraphs: tuple[str, ...]


def read_books(folder: Path) -> list[Section]:
    """Return the sections of every `*.txt` in a folder, in the order of file names."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(f"no *.txt files in {folder}")
    return [section for path in paths for section in sections_of(path.stem, path.read_text(encoding="utf-8"))]


def sections_of(book: str, text: str) -> list[Section]:
    """Cut one book's text into sections at its headings."""
    blocks = text_blocks(within_bounds(book, strip_licence(text.replace("\r\n", "\n").lstrip("\ufeff"))))
    style = has_single_quoted_dialogue(text)
    sections: list[Section] = []
    current: list[str] = []
    for block in [*blocks, "END"]:
        if is_heading(block):
            if sum(map(len, current)) > 400:
                sections.append(Section(book, tuple(current)))
            current = []
            continue
        paragraph = clean_paragraph(block, style)
        if paragraph and not UNKIND.search(paragraph):
            current.append(paragraph)
    return sections


def strip_licence(text: str) -> str:
    """Drop what Project Gutenberg puts before and after a book."""
    marks = list(GUTENBERG_MARK.finditer(text))
    if len(marks) < 2:
        return text
    return text[marks[0].end() : marks[-1].start()]


def within_bounds(book: str, text: str) -> str:
    """Drop the front and back matter of the books named in `BOUNDS`."""
    first, last = BOUNDS.get(book, ("", ""))
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith(first)), 0) if first else 0
    lines = lines[start:]
    end = next((i for i, line in enumerate(lines) if line.strip().startswith(last)), None) if last else None
    return "\n".join(lines[:end])


def text_blocks(text: str) -> list[str]:
    """Split at blank lines, drop page numbers and footnotes, and rejoin sentences that a page break cut."""
    blocks: list[str] = []
    for raw in re.split(r"\n\s*\n", text):
        block = raw.strip("\n")
        stripped = block.strip()
        if not stripped or PAGE_FURNITURE.match(stripped) or FOOTNOTE.match(stripped):
            continue
        if blocks and stripped[0].islower() and blocks[-1].rstrip()[-1] not in ".!?:\"”'’":
            joined = blocks[-1].rstrip()
            blocks[-1] = joined[:-1] + stripped if re.search(r"[a-z]-$", joined) else f"{joined} {stripped}"
        else:
            blocks.append(block)
    return blocks


def is_heading(block: str) -> bool:
    """Tell whether a block is a title: one or two short lines in capitals, or a short line without a full stop."""
    stripped = block.strip()
    if len(stripped) > 90 or stripped.count("\n") > 1 or stripped[0] in "\"'“‘":
        return False
    letters = [c for c in FOOTNOTE_REFERENCE.sub("", stripped) if c.isalpha()]
    if not letters:
        return True
    if all(c.isupper() for c in letters) or CHAPTER.match(stripped):
        return True
    return stripped[0].isupper() and "\n" not in stripped and stripped[-1] not in ".,;:!?\"”'’-—" and len(stripped) < 60


def clean_paragraph(block: str, has_single_quotes: bool) -> str:
    """Unwrap one paragraph (verse keeps its lines) and give it straight, double quotation marks."""
    text = FOOTNOTE_REFERENCE.sub("", block).translate(str.maketrans("`", "'", "_*[]"))
    text = re.sub(r"^\s*\d+\s+(?=[a-z])", "", text)
    lines = [line for line in text.split("\n") if line.strip()]
    is_verse = sum(line.startswith("  ") for line in lines) > len(lines) / 2
    joined = "\n".join(line.strip() for line in lines) if is_verse else " ".join(line.strip() for line in lines)
    joined = re.sub(r"[ \t]+", " ", joined)
    joined = re.sub(r" ?-{2,} ?", "—", joined)
    joined = re.sub(r"^[A-Z]{3,}(?= [a-z])", lambda match: match[0].capitalize(), joined)
    return normalise_quotes(joined, has_single_quotes).strip()


def has_single_quoted_dialogue(text: str) -> bool:
    """Tell whether a book marks speech with single quotation marks."""
    single = len(re.findall(r"(^|\s)[‘'](?=[A-Z])", text))
    double = len(re.findall(r"(^|\s)[“\"](?=[A-Z])", text))
    return single > double


def normalise_quotes(text: str, has_single_quotes: bool) -> str:
    """Turn typographic quotation marks into ASCII ones, and single-quoted speech into double-quoted speech."""
    if has_single_quotes:
        text = re.sub(r"[“”\"]", "'", text)
        text = re.sub(r"(^|[\s(—])[‘'](?=[A-Z\w])", r'\1"', text)
        text = re.sub(r"(?<=[.,!?;:—)])[’'](?=$|[\s)—;,.])", '"', text)
    return text.translate(str.maketrans("‘’“”", "''\"\"")).replace("…", "...")


def split_sections(sections: list[Section], every: int = 600, held: int = 12) -> tuple[list[Section], list[Section]]:
    """Hold out runs of `held` paragraphs, one in every `every`; returns (training, validation) sections."""
    training: list[Section] = []
    validation: list[Section] = []
    index = 0
    for section in sections:
        parts: list[tuple[bool, list[str]]] = []
        for paragraph in section.paragraphs:
            is_held = index % every >= every - held
            if not parts or parts[-1][0] != is_held:
                parts.append((is_held, []))
            parts[-1][1].append(paragraph)
            index += 1
        for is_held, paragraphs in parts:
            (validation if is_held else training).append(Section(section.book, tuple(paragraphs)))
    return training, validation
