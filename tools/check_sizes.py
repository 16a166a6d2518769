"""Source files, classes and functions that are too long, packages with too many fragments, and uses of `Any`."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 250
MAX_ARGUMENTS = 10
MIN_SOURCE_LINES = 40
# A module is a thing with a name: at most a tenth of all have fewer lines than that, and of those of these packages.
FEW_FRAGMENTS = ("*", "api-server", "llm", "model-runner")
SOURCES = ("packages/*/src/**/*.py", "packages/*/train/**/*.py", "tools/*.py")
NATIVE_SOURCES = ("packages/*/src/**/*.cpp", "packages/*/src/**/*.h")
TESTS = ("packages/*/tests/**/*.py", "packages/*/benchmarks/**/*.py", "benchmarks/**/*.py", "integration-tests/**/*.py")

# What is over a limit today. It may only shrink: the number is raised for nothing, and what fits leaves the list.
LARGE = {
    "packages/core-scheduler/src/llmstack_core_scheduler/scheduler.py:Scheduler": 330,
    "packages/engine-client/src/llmstack_engine_client/recovery/recovering.py:RecoveringClient": 350,
    "packages/engine-client/src/llmstack_engine_client/replicas/reloading.py:ReloadingClient": 360,
    "packages/kv-cache/src/llmstack_kv_cache/kv_cache_manager.py:KVCacheManager": 330,
    "packages/kv-cache/src/llmstack_kv_cache/prefix_index.py:PrefixIndex": 270,
    "packages/llm/src/llmstack_llm/async_llm.py:AsyncLLM": 350,
    "packages/llm/src/llmstack_llm/async_llm.py:AsyncLLM.__init__": 12,
    "packages/llm/src/llmstack_llm/engine_args.py:EngineArgs": 300,
    "packages/llm/src/llmstack_llm/engine_front_end.py:EngineFrontEnd": 360,
    "packages/llm/src/llmstack_llm/input_processor.py:InputProcessor": 310,
    "packages/llm/src/llmstack_llm/offline/llm.py:LLM": 320,
    "packages/llm/src/llmstack_llm/offline/llm_engine.py:LLMEngine": 270,
    "packages/llm/src/llmstack_llm/output_processor.py:OutputProcessor": 290,
    "packages/media/src/llmstack_media/front.py:MediaFront": 290,
    "packages/model-runner/src/llmstack_model_runner/layers/linear.py:Linear.__init__": 11,
    "packages/model-runner/src/llmstack_model_runner/model_runner.py:ModelRunner": 330,
    "packages/model-runner/src/llmstack_model_runner/steps/host_steps.py:HostSteps.__init__": 12,
    "packages/model-runner/src/llmstack_model_runner/steps/input_batch.py:InputBatch": 260,
    "packages/parallel/src/llmstack_parallel/runner.py:ParallelRunner": 265,
}
# The word in the code of a package. A `TypedDict`, a Protocol or `object` says more.
MAX_ANY = {
    "api-server": 102,
    "engine-client": 16,
    "engine-core": 29,
    "llm": 154,
}
SLACK = 10
"""Lines that a number here may lie above what it stands for, so that not every change has to lower it."""


def size_complaint(name: str, size: int, limit: int, what: str) -> Iterator[str]:
    """One line if `name` is larger than `limit` and than its number in `LARGE`, or that number is out of date."""
    allowed = LARGE.get(name)
    if allowed is None:
        if size > limit:
            yield f"{name}: {size} {what}, {limit} at most"
    elif size <= limit:
        yield f"{name}: {size} {what} fit the limit of {limit}; remove it from LARGE in tools/check_sizes.py"
    elif size > allowed:
        yield f"{name}: {size} {what}, and {allowed} in LARGE of tools/check_sizes.py may only shrink"
    elif size < allowed - SLACK:
        yield f"{name}: {size} {what}; lower its number in LARGE of tools/check_sizes.py from {allowed}"


def num_code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a class or a function, without its docstring and decorators."""
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return num_lines


def class_complaints(path: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """One line per class longer than the limit, and per constructor with too many arguments."""
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        name = f"{path.relative_to(ROOT)}:{node.name}"
        yield from size_complaint(name, num_code_lines(node), MAX_CLASS_LINES, "lines")
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                num_arguments = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                yield from size_complaint(f"{name}.__init__", num_arguments, MAX_ARGUMENTS, "arguments")


def function_complaints(path: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """One line per function longer than the limit, its docstring and decorators not counted."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = num_code_lines(node)
        if num_lines > MAX_FUNCTION_LINES:
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield f"{where}: {node.name} has {num_lines} lines, {MAX_FUNCTION_LINES} at most"


def file_complaints(path: Path, text: str) -> Iterator[str]:
    """One line if the file is longer than the limit."""
    yield from size_complaint(str(path.relative_to(ROOT)), text.count("\n"), MAX_FILE_LINES, "lines")


def any_complaints(package_to_num_any: Mapping[str, int]) -> Iterator[str]:
    """One line per package whose code says `Any` more often than its number in `MAX_ANY`, or that is out of date."""
    for package, limit in MAX_ANY.items():
        num_any = package_to_num_any.get(package, 0)
        if num_any > limit:
            yield f"packages/{package}: `Any` {num_any} times, {limit} at most: say more by a type"
        elif num_any < limit - SLACK:
            yield f"packages/{package}: `Any` {num_any} times; lower its number in MAX_ANY from {limit}"


def fragment_complaints(package: str) -> Iterator[str]:
    """One line if more than a tenth of a package's modules are shorter than `MIN_SOURCE_LINES`; `*` is all packages."""
    paths = [path for path in ROOT.glob(f"packages/{package}/src/**/*.py") if path.name != "__init__.py"]
    short = [path for path in paths if path.read_text(encoding="utf-8").count("\n") < MIN_SOURCE_LINES]
    if 10 * len(short) > len(paths):
        names = ", ".join(sorted(path.name for path in short))
        yield f"packages/{package}: {len(short)} of {len(paths)} modules have under {MIN_SOURCE_LINES} lines: {names}"


def complaints() -> Iterator[str]:
    for package in FEW_FRAGMENTS:
        yield from fragment_complaints(package)
    for name in LARGE:
        if not (ROOT / name.partition(":")[0]).exists():
            yield f"{name}: there is no such file; remove it from LARGE in tools/check_sizes.py"
    package_to_num_any: Counter[str] = Counter()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text, str(path))))
        yield from file_complaints(path, text)
        yield from class_complaints(path, nodes)
        yield from function_complaints(path, nodes)
        num_any = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
        package_to_num_any[path.relative_to(ROOT).parts[1]] += num_any
    yield from any_complaints(package_to_num_any)
    for path in sorted(path for pattern in (*NATIVE_SOURCES, *TESTS) for path in ROOT.glob(pattern)):
        yield from file_complaints(path, path.read_text(encoding="utf-8"))


def main() -> int:
    found = list(complaints())
    print("\n".join(found) if found else "sizes: every file, class and function reads in one sitting")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
