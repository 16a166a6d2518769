"""PyTorch without what only its compiler, its exporter and training need.

That is 40 % of its import. It follows when a further module of PyTorch is imported, or code asks `torch` for a part.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib import _bootstrap
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

KNOWN_VERSIONS: Final = ("2.13.",)
"""How versions begin whose own modules use nothing of the parts while they are imported."""
PARTS: Final = (
    "torchgen.model", "torch.utils.data", "torch.distributions", "torch.nested", "torch.ao", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization", "torch.masked",
    "torch.export", "torch.func", "torch._higher_order_ops", "torch._higher_order_ops.invoke_subgraph",
    "torch.distributed._meta_registrations", "torch._meta_registrations", "torch._native",
)  # fmt: skip
"""In the order in which PyTorch imports them."""
NAMES: Final = (
    ("torch", "cond", "torch._higher_order_ops"),
    ("torch", "while_loop", "torch._higher_order_ops"),
    ("torch", "vmap", "torch.func"),
    ("torch.compiler", "NestedCompileRegionOptions", "torch._higher_order_ops.invoke_subgraph"),
    ("torch", "Generator", "torch._C"),
)
"""Modules, names in them, and where these are from: parts, and what cannot be used before a part is imported."""
_OWN_FIND_AND_LOAD: Final = vars(_bootstrap)["_find_and_load"]

_lock = threading.RLock()
_is_lean = False


def import_lean() -> None:
    """Imports PyTorch without the parts, unless it is imported already or its version is not known."""
    global _is_lean
    if "torch" in sys.modules or not _is_known():
        return
    placeholders = _Placeholders()
    sys.meta_path.insert(0, placeholders)
    try:
        importlib.import_module("torch")
    finally:
        sys.meta_path.remove(placeholders)
        _end_placeholders()
    for name, module in list(sys.modules.items()):
        if (name in ("torch", "torchgen") or name.startswith("torch.")) and "__path__" in vars(module):
            _ask_for_parts(module)
    _is_lean = True
    vars(_bootstrap)["_find_and_load"] = _find_and_load


def import_parts() -> None:
    """Imports the parts that were left out. It comes before foreign code, which may use any of them.

    One thread imports them, and others that ask wait for all of them: they import each other, so two threads that
    begin at two of them would each find modules that the other has not finished.
    """
    global _is_lean
    with _lock:
        if not _is_lean:  # also where a part asks for another while it is imported
            return
        _is_lean = False
        try:
            for name in PARTS:
                importlib.import_module(name)
        except BaseException:
            _is_lean = True
            raise
        for module, name, part in NAMES:
            setattr(sys.modules[module], name, getattr(sys.modules[part], name))
        vars(_bootstrap)["_find_and_load"] = _OWN_FIND_AND_LOAD


def _is_known() -> bool:
    try:
        return version("torch").startswith(KNOWN_VERSIONS)
    except PackageNotFoundError:
        return False


def _find_and_load(name: str, *rest: Any) -> Any:
    """Imports a module that is not in memory: the next one of PyTorch imports all parts before it.

    A finder would come too late. Its thread has the locks of that module and of its parents by then, and the thread
    that imports the parts would wait for them for ever.
    """
    if name.startswith("torch.") and _exists(name):
        import_parts()
    return _OWN_FIND_AND_LOAD(name, *rest)


def _exists(name: str) -> bool:
    """Whether there is such a module, as far as its parent tells; it may be a part's."""
    parent = sys.modules.get(name.rpartition(".")[0])
    return parent is None or PathFinder.find_spec(name, getattr(parent, "__path__", [])) is not None


class _Placeholders(MetaPathFinder, Loader):
    """Finds empty modules in place of the parts while PyTorch is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """For a part; None for all others."""
        return ModuleSpec(name, self, is_package=True) if name in PARTS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module without names of its own."""
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is."""


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if any((name, self.__name__) == known[1:] for known in NAMES):
            return type(name, (), {})  # of use in annotations, as in `X | None`
        raise AttributeError(f"module {self.__name__!r} is left out, and {name!r} of it is needed")


def _end_placeholders() -> None:
    """Takes the empty modules and their names away."""
    for name in PARTS:
        parent, _, child = name.rpartition(".")
        sys.modules.pop(name, None)
        vars(sys.modules.get(parent, ModuleType(parent))).pop(child, None)
    for module, name, _ in NAMES:
        if module == "torch" and module in sys.modules:
            vars(sys.modules[module]).pop(name, None)


def _ask_for_parts(parent: ModuleType) -> None:
    """Lets `parent.name` import the parts, where `name` is a module of PyTorch, or a name in a part."""
    own = getattr(parent, "__getattr__", None)
    names = {name: part for module, name, part in NAMES if module == parent.__name__}

    def find(name: str) -> Any:
        child = f"{parent.__name__}.{name}"
        if name in names or PathFinder.find_spec(child, parent.__path__) is not None:
            import_parts()
            if name in names:
                return getattr(importlib.import_module(names[name]), name)
            if child in PARTS:
                return importlib.import_module(child)
            if name in vars(parent):
                return vars(parent)[name]
        if own is not None:
            return own(name)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}")

    vars(parent)["__getattr__"] = find
