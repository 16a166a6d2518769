"""A requirements file for the whole workspace, with each third-party project at the lowest version that is declared.

    python tools/lowest_versions.py > requirements.txt
    python tools/lowest_versions.py --members > members.txt

The first has what the packages and their extras require, and the developers' tools in any version. The second has the
packages in editable form, to be installed without their requirements; `pip check` then compares the two.

Where several packages require one project, the highest of their lower bounds counts: no lower version can be installed
beside all of them. What the developers' environment pins exactly, such as PyTorch, keeps that version.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> Iterator[Requirement]:
    """Third-party requirements of all packages, those of their extras included."""
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for group in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            yield from (one for one in map(Requirement, group) if not one.name.startswith("llmstack-"))


def lower_bound(requirement: Requirement) -> Version:
    """The version after `>=` or `==`.

    Raises:
        ValueError: The requirement has no lower bound.
    """
    for specifier in requirement.specifier:
        if specifier.operator in (">=", "==", "~="):
            return Version(specifier.version)
    raise ValueError(f"{requirement} has no lower bound")


def lowest_versions() -> dict[str, Version]:
    """Project to the lowest version that all packages accept."""
    found: dict[str, Version] = {}
    for requirement in requirements():
        bound = lower_bound(requirement)
        found[requirement.name] = max(bound, found.get(requirement.name, bound))
    return found


def developers_requirements() -> list[Requirement]:
    """What the developers' environment asks for."""
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [Requirement(text) for text in workspace["tool"]["hatch"]["envs"]["default"]["dependencies"]]


def members() -> Iterator[str]:
    """Each package in editable form."""
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        yield f"--editable ./packages/{path.parent.name}"


def lines() -> Iterator[str]:
    """The requirements file."""
    lowest = lowest_versions()
    for requirement in developers_requirements():
        is_exact = any(specifier.operator == "==" for specifier in requirement.specifier)
        if is_exact or requirement.name not in lowest:
            lowest.pop(requirement.name, None)
            yield str(requirement)
    yield from (f"{name}=={version}" for name, version in sorted(lowest.items()))


if __name__ == "__main__":
    print("\n".join(members() if "--members" in sys.argv else lines()))
