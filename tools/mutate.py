"""Mutation tests: changes the code in small ways, and says which changes no test sees.

    python tools/mutate.py journal admission
    python tools/mutate.py cache scheduler --sample 120 --seed 1

Each target is a part of the code with the tests that have to see its changes; slow tests are left out. A changed
function is tested by the tests that call it, in forks of one process (mutmut). `.mutants/TARGET` keeps the results:
a second call tests new functions, and what no test saw. With `--sample` it tests random changes only, and says how far
the share of all changes may be from theirs. What no test can see is listed with its reason in
`tools/equivalent_mutants.toml`. `docs/reliability.md` has the last figures.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
CONFTEST = ROOT / "tools" / "mutation_conftest.py"
MIN_KILLED = 0.9
PYTEST = ["-c", str(ROOT / "pyproject.toml"), "--rootdir=.", "-p", "no:cacheprovider", "--timeout=0", "-m", "not full"]
NAME = re.compile(r"^\s*(?P<name>\S+__mutmut_\d+): (?P<status>.+)$")
KILLED, NOT_CHECKED = ("killed", "timeout"), "not checked"
NO_FUNCTION = "no_function_has_this_name"


@dataclass(frozen=True)
class Target:
    """Which modules are changed, and which tests run.

    Attributes:
        left_out: Tests that are slow, or need what is not installed here.
        unchanged: Modules that need PyTorch.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutant:
    """A change by its function and the two lines, so that it keeps its name when others come and go."""

    function: str
    removed: str
    added: str


@dataclass(frozen=True)
class Sample:
    """So many random changes in place of all."""

    size: int
    seed: int


TARGETS = {
    "journal": Target(
        ("engine-client",),
        ("recovery/journal.py", "recovery/suspects.py"),
        ("engine-client/tests/test_journal.py", "engine-client/tests/test_suspects.py"),
    ),
    "admission": Target(
        ("llm", "engine-core"),
        ("llmstack_llm/admission/*.py", "llmstack_engine_core/admission.py"),
        ("llm/tests/admission", "engine-core/tests/test_admission.py"),
    ),
    "cache": Target(
        ("kv-cache",),
        ("llmstack_kv_cache/*.py",),
        ("kv-cache/tests",),
        ("test_readme.py", "test_storage.py", "test_slot_mapping.py"),
        ("storage.py", "slot_mapping.py"),
    ),
    "scheduler": Target(
        ("core-scheduler",),
        ("llmstack_core_scheduler/*.py",),
        ("core-scheduler/tests",),
        ("test_simulation.py",),
    ),
}  # fmt: skip


def prepare(name: str, target: Target) -> Path:
    """A folder with copies of the sources and tests; files that did not change stay, so that results do too."""
    folder = ROOT / ".mutants" / name
    for package in target.packages:
        _copy(ROOT / "packages" / package / "src", folder / "src")
    shutil.rmtree(folder / "mutants" / "tests", ignore_errors=True)
    for test in target.tests:
        source = ROOT / "packages" / test
        _copy(source, folder / "tests" / test if source.is_dir() else folder / "tests" / Path(test).parent)
    shutil.copy(CONFTEST, folder / "tests" / "conftest.py")
    modules = [f"*/{module}" for module in target.modules]
    options = [*PYTEST, *(f"--ignore-glob=*/{one}" for one in target.left_out)]
    lines = {
        "source_paths": ["src"], "only_mutate": modules,
        "do_not_mutate": ["*/testing/*", *(f"*/{one}" for one in target.unchanged)],
        "pytest_add_cli_args_test_selection": ["tests"], "pytest_add_cli_args": options,
        "use_git_change_detection": False, "timeout_constant": 10.0, "timeout_multiplier": 4.0,
    }  # fmt: skip
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    (folder / "pyproject.toml").write_text("[tool.mutmut]\n" + text, encoding="utf-8")
    return folder


def _copy(source: Path, target: Path) -> None:
    """Copies files whose text is another, and no others."""
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        place = target / (path.name if source.is_file() else path.relative_to(source))
        if path.suffix == ".pyc" or (place.exists() and place.read_bytes() == path.read_bytes()):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def mutmut(folder: Path, *arguments: str) -> str:
    """What a command of mutmut prints."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def statuses(folder: Path) -> dict[str, str]:
    """What became of each change."""
    matches = map(NAME.match, mutmut(folder, "results", "--all", "true").splitlines())
    return {match["name"]: match["status"] for match in matches if match}


def survivor_names(found: Mapping[str, str]) -> list[str]:
    """The changes that no test saw, and those that none could have seen because none calls the function."""
    return [name for name, status in found.items() if status not in KILLED and status != NOT_CHECKED]


def sampled(found: Mapping[str, str], sample: Sample | None) -> dict[str, str]:
    """Random changes of all; the same ones for the same seed and the same code."""
    if sample is None or sample.size >= len(found):
        return dict(found)
    draw = random.Random(sample.seed)  # noqa: S311 (the same seed has to give the same changes)
    chosen = set(draw.sample(sorted(found), sample.size))
    return {name: status for name, status in found.items() if name in chosen}


def interval(num_killed: int, num_tested: int) -> tuple[float, float]:
    """Where the share of all changes is with 95 %, by Wilson's score: it holds near 100 % too."""
    share, z = num_killed / max(num_tested, 1), 1.96
    weight = 1 + z * z / max(num_tested, 1)
    middle = (share + z * z / (2 * max(num_tested, 1))) / weight
    half = z / weight * math.sqrt(share * (1 - share) / max(num_tested, 1) + (z / (2 * max(num_tested, 1))) ** 2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def describe(folder: Path, name: str) -> Mutant:
    """What mutmut calls `package.module.xǁClassǁmethod__mutmut_7`."""
    module, _, function = name.rpartition("__mutmut_")[0].rpartition(".")
    diff = mutmut(folder, "show", name).splitlines()
    function = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
    return Mutant(f"{module}.{function}", _changed(diff, "-"), _changed(diff, "+"))


def test(name: str, target: Target, num_workers: int, sample: Sample | None) -> Path:
    """Tests what has not been tested, and what survived: there may be new tests."""
    folder = prepare(name, target)
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(num_workers)]
    if sample is not None:
        # It makes the changes, and fails because it finds none of this name. What else fails, fails below again.
        subprocess.run([*command, f"*.{NO_FUNCTION}*"], cwd=folder, check=False, capture_output=True)
        found = sampled(statuses(folder), sample)
        if names := [one for one, status in found.items() if status not in KILLED]:
            subprocess.run([*command, *names], cwd=folder, check=True)
        return folder
    if (folder / "mutants" / "mutmut-stats.json").exists() and (names := survivor_names(statuses(folder))):
        subprocess.run([*command, *names], cwd=folder, check=True)
    subprocess.run(command, cwd=folder, check=True)
    return folder


def _changed(diff: Iterable[str], sign: str) -> str:
    return " ".join(line[1:].strip() for line in diff if line.startswith(sign) and not line.startswith(sign * 3))


def equivalent_mutants() -> dict[Mutant, str]:
    """The listed ones, with their reasons."""
    rows = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {Mutant(row["function"], row["removed"], row["added"]): row["reason"] for row in rows}


def judge(name: str, folder: Path, sample: Sample | None) -> bool:
    """Prints the result of a target; whether enough is killed, of all that was to be tested."""
    every = statuses(folder)
    found = sampled(every, sample)
    left, listed = [describe(folder, one) for one in survivor_names(found)], equivalent_mutants()
    real = [mutant for mutant in left if mutant not in listed]
    for mutant in real:
        print(f"{mutant.function}\n  - {mutant.removed}\n  + {mutant.added}")
    num_killed, num_equivalent = sum(status in KILLED for status in found.values()), len(left) - len(real)
    num_timeout = list(found.values()).count("timeout")
    share = num_killed / max(num_killed + len(real), 1)
    print(
        f"{name}: {num_killed} killed ({num_timeout} by time), {len(real)} not, {num_equivalent} equivalent, "
        f"{list(found.values()).count(NOT_CHECKED)} not tested: {share:.1%}"
    )
    if sample is not None:
        low, high = interval(num_killed, num_killed + len(real))
        print(f"a random sample of {len(found)} of {len(every)}, seed {sample.seed}; 95 %: {low:.1%} to {high:.1%}")
    return share >= MIN_KILLED and NOT_CHECKED not in found.values()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--judge", action="store_true", help="print the results that are there, and test nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="test N random changes of each target, and no others")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    options = parser.parse_args(arguments)
    if options.sample is not None and options.sample < 1:
        parser.error("--sample must be at least 1")
    sample = None if options.sample is None else Sample(options.sample, options.seed)
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = []
    for name in options.targets or TARGETS:
        folder = ROOT / ".mutants" / name if options.judge else test(name, TARGETS[name], options.workers, sample)
        results.append(judge(name, folder, sample))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
