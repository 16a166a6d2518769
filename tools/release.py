"""Releases one package: checks the tree, the version and the changelog, builds sdist and wheel, and tags the commit.

    python tools/release.py kv-cache              says what it would do
    python tools/release.py kv-cache --execute    does it: files under dist/, an annotated tag kv-cache-v0.2.0
    python tools/release.py --tag kv-cache-v0.2.0 builds what is uploaded for a pushed tag, into dist/upload

A person pushes the tag. The release workflow then builds and uploads.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Package:
    """A package as its folder describes it."""

    folder: Path
    name: str
    version: str
    requirements: tuple[Requirement, ...]

    @property
    def tag(self) -> str:
        return f"{self.folder.name}-v{self.version}"


def read_package(folder: Path) -> Package:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = tuple(Requirement(text) for text in project.get("dependencies", []))
    return Package(folder, project["name"], project["version"], requirements)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def changelog_obstacles(package: Package) -> Iterator[str]:
    """What the topmost changelog entry lacks to describe this version as released."""
    top = CHANGELOG_HEADING.search((package.folder / "CHANGELOG.md").read_text(encoding="utf-8"))
    if top is None:
        yield "CHANGELOG.md has no entry of the form `## [1.2.3] - 2026-01-31`"
    elif top["version"] != package.version:
        yield f"CHANGELOG.md begins with {top['version']}, pyproject.toml says {package.version}"
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", top["date"]):
        yield f"CHANGELOG.md says {top['date']!r} where the date of the release belongs"


def sibling_obstacles(package: Package) -> Iterator[str]:
    """Requirements that the siblings of this tree do not meet: the release would be tested against nothing."""
    siblings = {sibling.name: sibling for sibling in map(read_package, sorted(ROOT.glob("packages/*")))}
    for requirement in package.requirements:
        sibling = siblings.get(requirement.name)
        if sibling is not None and not requirement.specifier.contains(sibling.version):
            yield f"requires {requirement}, the tree has {sibling.version}"


def obstacles(package: Package) -> Iterator[str]:
    """Everything that forbids a release now."""
    if git("status", "--porcelain"):
        yield "the working tree has uncommitted changes"
    if git("tag", "--list", package.tag):
        yield f"the tag {package.tag} exists: raise the version"
    yield from changelog_obstacles(package)
    yield from sibling_obstacles(package)


def release(package: Package) -> None:
    """Builds into `dist/<tag>/` and tags the commit."""
    target = ROOT / "dist" / package.tag
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(package.folder)]
    subprocess.run(command, check=True)
    git("tag", "--annotate", package.tag, "--message", f"{package.name} {package.version}")
    print(
        f"built {target.relative_to(ROOT)} and tagged {package.tag}; next: git push origin {package.tag}, then upload"
    )


def package_of(tag: str) -> Package:
    """The package that `tag` names.

    Raises:
        ValueError: The tag is malformed, or names no package or another version than the tree has.
    """
    folder, separator, _ = tag.rpartition("-v")
    if not separator or not (ROOT / "packages" / folder / "pyproject.toml").is_file():
        raise ValueError(f"{tag!r} is not the tag of a package, such as kv-cache-v0.2.0")
    package = read_package(ROOT / "packages" / folder)
    if package.tag != tag:
        raise ValueError(f"{tag!r} is not the version of the tree, which is {package.tag!r}")
    return package


def build_distributions(package: Package) -> None:
    """Builds what belongs on the index into `dist/upload`; wheels with native code come from `make manylinux`."""
    has_native_code = (package.folder / "hatch_build.py").is_file()
    kinds = ["--sdist"] if has_native_code else ["--sdist", "--wheel"]
    target = ROOT / "dist" / "upload"
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(target), str(package.folder)]
    subprocess.run(command, check=True)


def release_tag(tag: str) -> int:
    """Checks and builds the package of a pushed tag; returns the exit code."""
    try:
        package = package_of(tag)
    except ValueError as error:
        print(error)
        return 1
    found = [*changelog_obstacles(package), *sibling_obstacles(package)]
    if found:
        print("\n".join(f"{package.folder.name}: {obstacle}" for obstacle in found))
        return 1
    build_distributions(package)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Release one package.")
    folders = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    parser.add_argument("package", nargs="?", choices=folders)
    parser.add_argument("--execute", action="store_true", help="build and tag; without it only the checks run")
    parser.add_argument("--tag", help="build the distributions of this tag instead")
    options = parser.parse_args()
    if (options.package is None) == (options.tag is None):
        parser.error("name a package, or a tag with --tag")
    if options.tag is not None:
        return release_tag(options.tag)
    package = read_package(ROOT / "packages" / options.package)
    found = list(obstacles(package))
    for obstacle in found:
        print(f"{package.folder.name}: {obstacle}")
    if found:
        return 1
    if options.execute:
        release(package)
    else:
        print(f"would build {package.name} {package.version} and tag {package.tag}; --execute does it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
