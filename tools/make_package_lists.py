"""The lists of packages in pyproject.toml and README.md, made from the packages' own metadata.

    python tools/make_package_lists.py            writes them
    python tools/make_package_lists.py --check    exit code 1 with one line for each list that is not current

Which packages a contract of import-linter is about follows from what they require: a leaf requires no sibling, and a
package that requires no torch may not import it. The layers are a decision and stay as they are written; each package
that imports siblings must be in one of them.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
BEGIN, END = "<!-- table of packages: begin (tools/make_package_lists.py) -->\n", "<!-- table of packages: end -->\n"


@dataclass(frozen=True)
class Package:
    """What a package's pyproject.toml says of it."""

    folder: str
    import_name: str
    name: str
    description: str
    requirements: frozenset[str]
    extra_requirements: frozenset[str]

    @property
    def is_leaf(self) -> bool:
        return not any(name.startswith("llmstack-") for name in self.requirements)

    @property
    def torch(self) -> str:
        """Whether the package needs torch, as the table of packages says it."""
        if "torch" in self.requirements:
            return "yes"
        return "extra" if "torch" in self.extra_requirements else "no"


def read_packages(root: Path) -> list[Package]:
    """All packages of the repository, by folder."""
    return [_read_package(file) for file in sorted(root.glob("packages/*/pyproject.toml"))]


def _read_package(file: Path) -> Package:
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = [text for texts in project.get("optional-dependencies", {}).values() for text in texts]
    return Package(
        folder=file.parent.name,
        import_name=next(path.name for path in sorted(file.parent.glob("src/llmstack_*"))),
        name=project["name"],
        description=project["description"],
        requirements=frozenset(map(_name_of, project["dependencies"])),
        extra_requirements=frozenset(map(_name_of, extras)),
    )


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


# pyproject.toml


def lists_of(packages: list[Package]) -> Iterator[tuple[str, str, list[str]]]:
    """What comes before each list, its key, and its items in order."""
    everything = sorted(package.import_name for package in packages)
    leaves = sorted(package.import_name for package in packages if package.is_leaf)
    without_torch = sorted(package.import_name for package in packages if package.torch == "no")
    yield "[tool.ruff.lint.isort]", "known-first-party", everything
    yield "[tool.mypy]", "mypy_path", [*sorted(f"packages/{package.folder}/src" for package in packages), "tools"]
    yield "[tool.importlinter]", "root_packages", everything
    yield 'id = "leaves"', "modules", leaves
    yield 'id = "leaves-down"', "source_modules", leaves
    yield 'id = "leaves-down"', "forbidden_modules", sorted(set(everything) - set(leaves))
    yield 'id = "acyclic"', "ancestors", everything
    yield 'id = "no-torch"', "source_modules", without_torch
    yield 'id = "no-code-in-data"', "source_modules", everything


def with_lists(text: str, packages: list[Package]) -> str:
    """The text of pyproject.toml with every list of packages as it should be.

    Raises:
        ValueError: A list is missing.
    """
    for heading, key, items in lists_of(packages):
        pattern = re.compile(rf"({re.escape(heading)}\n(?:(?!\[\[?tool).*\n)*?{key} = )\[[^]]*\]")
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"pyproject.toml has no list {key} under {heading}")
        text = f"{text[: found.start()]}{found[1]}[\n{_wrapped(items)}]{text[found.end() :]}"
    return text


def _wrapped(items: list[str]) -> str:
    words = " ".join(f'"{item}",' for item in items)
    indent = "    "
    return textwrap.fill(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False) + "\n"


def layer_complaints(text: str, packages: list[Package]) -> list[str]:
    """One line for each package that imports siblings and is not in exactly one layer."""
    contracts: list[dict[str, Any]] = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    named = [part.strip() for layer in layers for part in layer.split("|")]
    counts = {package.import_name: named.count(package.import_name) for package in packages if not package.is_leaf}
    return [
        f"pyproject.toml: {name} is in {count} layers instead of one" for name, count in counts.items() if count != 1
    ]


# README.md


def table(packages: list[Package]) -> str:
    """The table of packages, those that require most first."""
    name_to_package = {package.name: package for package in packages}
    ordered = sorted(packages, key=lambda package: (-len(_below(package, name_to_package)), package.name))
    rows = [f"| [`{p.name}`](packages/{p.folder}) | {p.description.removesuffix('.')} | {p.torch} |\n" for p in ordered]
    return "".join(["| package | what it is | torch |\n|---|---|---|\n", *rows])


def _below(package: Package, name_to_package: dict[str, Package]) -> set[str]:
    names: set[str] = set()
    for name in package.requirements & set(name_to_package):
        names |= {name} | _below(name_to_package[name], name_to_package)
    return names


def with_table(text: str, packages: list[Package]) -> str:
    """The README with the table between its two marks; unchanged where it has no marks."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + table(packages) + END, text, flags=re.S)


# The command


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Writes the lists of packages in pyproject.toml and README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a list is not current")
    options = parser.parse_args(arguments)
    packages = read_packages(root)
    complaints = []
    for name, make in (("pyproject.toml", with_lists), ("README.md", with_table)):
        file = root / name
        text = file.read_text(encoding="utf-8")
        made = make(text, packages)
        if made != text and options.check:
            complaints.append(f"{name}: its lists of packages are not current; run python tools/make_package_lists.py")
        elif made != text:
            file.write_text(made, encoding="utf-8")
    complaints += layer_complaints((root / "pyproject.toml").read_text(encoding="utf-8"), packages)
    if BEGIN not in (root / "README.md").read_text(encoding="utf-8"):
        complaints.append("README.md: the marks of the table of packages are missing")
    print("\n".join(complaints) if complaints else f"lists of packages: {len(packages)} packages")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
