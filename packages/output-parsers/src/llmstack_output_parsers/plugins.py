"""Parsers of a user's own: `module:Class`, `FILE.py` or `FILE.py:Class`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_FILE_BYTES = 1 << 20
_METHODS = ("feed", "finish")
_FOREIGN = ("vllm", "sglang")


class UnknownParserError(ValueError):
    """There is no such parser; the text lists the known ones."""


def check_plugin(plugin: str) -> None:
    """Refuses a plug-in of which reading shows that it cannot work; nothing of it is executed.

    Raises:
        UnknownParserError: The file or the module is not there, the file is no Python, or it is for another engine.
    """
    path, name = _split(plugin)
    if path is None:
        _check_module(plugin)
        return
    classes = _classes_of(path)
    if name and name not in classes:
        raise UnknownParserError(f"'{_shown(path)}' has no class {name[:64]}")
    if not classes:
        raise UnknownParserError(f"'{_shown(path)}' has no class")


def load_plugin(plugin: str, name: str) -> Any:
    """The class of a plug-in; where a file has several parsers, the one that `name` names.

    Raises:
        UnknownParserError: It cannot be loaded, or it has no parser, or several.
    """
    check_plugin(plugin)
    path, class_name = _split(plugin)
    try:
        if path is None:
            module_name, _, class_name = plugin.partition(":")
            return getattr(importlib.import_module(module_name), class_name)
        module = _module_of(path)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnknownParserError(f"'{plugin[-128:]}' cannot be loaded: {text}") from error
    return getattr(module, class_name) if class_name else _only_parser(module, path, name)


def _split(plugin: str) -> tuple[Path | None, str]:
    """The file and the class of a plug-in; no file where it names a module."""
    path, _, name = plugin.rpartition(":") if not plugin.endswith(".py") else (plugin, "", "")
    return (Path(path).expanduser(), name) if path.endswith(".py") else (None, name)


def _check_module(plugin: str) -> None:
    module_name, _, name = plugin.partition(":")
    top = module_name.partition(".")[0]
    if not (top.isidentifier() and name.isidentifier()):
        raise UnknownParserError(f"'{plugin[:128]}' is neither module:Class nor a file of Python (FILE.py)")
    try:
        is_there = importlib.util.find_spec(top) is not None
    except ValueError:  # a module that Python made by itself, such as __main__
        is_there = False
    if not is_there:
        raise UnknownParserError(f"'{plugin[:128]}': there is no module '{top[:64]}'")


def _classes_of(path: Path) -> list[str]:
    """The public classes that a file defines."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UnknownParserError(f"'{_shown(path)}' has over {_MAX_FILE_BYTES} bytes")
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise UnknownParserError(f"'{_shown(path)}' cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownParserError(f"'{_shown(path)}' is no Python: {str(error)[:200]}") from error
    for package in _FOREIGN:
        if package in _imported(tree):
            raise UnknownParserError(
                f"'{_shown(path)}' is written for {package}, which it imports; a parser for llmstack is a class with "
                "the methods feed and finish (docs/tools.md)"
            )
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def _imported(tree: ast.Module) -> set[str]:
    """The packages that any part of a file imports."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def _module_of(path: Path) -> ModuleType:
    name = f"llmstack_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no file of Python")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _only_parser(module: ModuleType, path: Path, name: str) -> Any:
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and not key.startswith("_")
        and all(callable(getattr(value, method, None)) for method in _METHODS)
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    if not found:
        raise UnknownParserError(f"'{_shown(path)}' has no class with the methods feed and finish")
    raise UnknownParserError(f"'{_shown(path)}' has several parsers; name one as {path.name}:{min(found)}")


def _shown(path: Path) -> str:
    return str(path)[-128:]
