"""PyTorch without what only its compiler, its exporter and training need.

That is 40 % of its import. It follows when a further module of PyTorch is imported, or code asks `torch` for a part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

KNOWN_VERSIONS: Final = ("2.13.",)
"""How versions begin whose own modules use nothing of the parts while they are imported."""
PARTS: Final = (
    "torch.utils.data", "torch.distributions", "torch.nested", "torch.ao", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization", "torch.masked",
    "torch.export", "torch.func", "torch._higher_order_ops", "torch._higher_order_ops.invoke_subgraph",
    "torch.distributed._meta_registrations", "torch._meta_registrations",
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


def import_lean() -> None:
    """Imports PyTorch without the parts, unless it is imported already or its version is not known."""
    if "torch" in sys.modules or not _is_known():
        return
    sys.meta_path.insert(0, _PARTS)
    try:
        importlib.import_module("torch")
    finally:
        _PARTS.end_placeholders()
    for name, module in list(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and "__path__" in vars(module):
            _ask_for_parts(module)


def import_parts() -> None:
    """Imports the parts that were left out. What loads code of others, which may use any of them, calls it before."""
    if _PARTS not in sys.meta_path:
        return
    sys.meta_path.remove(_PARTS)
    for name in PARTS:
        importlib.import_module(name)
    for module, name, part in NAMES:
        setattr(sys.modules[module], name, getattr(sys.modules[part], name))


def _is_known() -> bool:
    try:
        return version("torch").startswith(KNOWN_VERSIONS)
    except PackageNotFoundError:
        return False


class _Parts(MetaPathFinder, Loader):
    """Finds empty modules in place of the parts while PyTorch is imported. The next module of it imports all parts."""

    def __init__(self) -> None:
        self._is_importing = True
        self._spec: ModuleSpec | None = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """For a part, or later for any module of PyTorch that exists; None for all others."""
        if self._is_importing:
            return ModuleSpec(name, self, is_package=True) if name in PARTS else None
        is_found = name.startswith("torch.") and PathFinder.find_spec(name, path, target) is not None
        return ModuleSpec(name, self) if is_found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, or the one of that name after all parts are imported."""
        if self._is_importing:
            return _Placeholder(spec.name)
        import_parts()
        module = importlib.import_module(spec.name)  # by other finders
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A module of other finders keeps its own specification."""
        if not self._is_importing:
            module.__spec__ = self._spec

    def end_placeholders(self) -> None:
        """Takes the empty modules and their names away."""
        self._is_importing = False
        for name in PARTS:
            parent, _, child = name.rpartition(".")
            sys.modules.pop(name, None)
            vars(sys.modules.get(parent, ModuleType(parent))).pop(child, None)
        for module, name, _ in NAMES:
            if module == "torch" and module in sys.modules:
                vars(sys.modules[module]).pop(name, None)


_PARTS: Final = _Parts()


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if any((name, self.__name__) == known[1:] for known in NAMES):
            return type(name, (), {})  # of use in annotations, as in `X | None`
        raise AttributeError(f"module {self.__name__!r} is left out, and {name!r} of it is needed")


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
                return importlib.import_module(child)  # another thread may be about to
            if name in vars(parent):
                return vars(parent)[name]
        if own is not None:
            return own(name)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}")

    vars(parent)["__getattr__"] = find
