"""Callables of the user's own: which file a spec names, and how it is loaded."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_pipeline.errors import UserError


def user_file(spec: str) -> Path | None:
    """The file that `path/file.py:callable` names, as written; None for `module:callable`."""
    origin, _, _ = spec.rpartition(":")
    return Path(origin) if origin.endswith(".py") else None


def load_callable(spec: str, root: Path) -> Callable[..., Any]:
    """What `load_callables` gives for a single spec."""
    return load_callables([spec], root)[0]


def load_callables(specs: Sequence[str], root: Path) -> list[Callable[..., Any]]:
    """The callables that `path/file.py:callable` (relative to root) or `module:callable` name.

    A file is read anew at each call, and once for all specs that name it. Raises UserError if one cannot be found,
    imported or called.
    """
    modules: dict[str, ModuleType] = {}
    found = []
    for spec in specs:
        origin, _, name = spec.rpartition(":")
        if not origin or not name:
            raise UserError(f"{spec!r}: write it as path/file.py:callable or module:callable")
        if origin not in modules:
            path = user_file(spec)
            modules[origin] = _import(spec, origin) if path is None else _execute(spec, root / path)
        found.append(_member(spec, modules[origin], origin, name))
    return found


def _member(spec: str, module: ModuleType, origin: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise UserError(f"{spec}: {origin} has no {name}; it has {', '.join(_callables(module)) or 'no callable'}")
    if not callable(found):
        raise UserError(f"{spec}: {name} is a {type(found).__name__}, not a callable; name a function")
    return found  # type: ignore[no-any-return]


def _import(spec: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(origin)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{spec}: module {origin} could not be imported: {_told(error)}; install it, or name a file of the project "
            "as path/file.py:callable"
        ) from error


def _execute(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{spec}: {path}: no such file; the path is taken from the project's folder")
    # Compiled here rather than by an import: cached bytecode is looked up by size and second of change, so a file
    # edited twice in a second would run as it was before.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = ModuleType(_module_name(path))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserError(f"{spec}: {path} could not be loaded: {_told(error)}; mend the file") from error
    return module


def _module_name(path: Path) -> str:
    """The file's own name where an import of that finds the file, so that spawned processes find its functions.

    Otherwise one that no import finds.
    """
    name, resolved = path.stem, path.resolve()
    if name.isidentifier() and name not in sys.stdlib_module_names:
        importlib.invalidate_caches()
        spec = PathFinder.find_spec(name)
        found = spec.origin if spec is not None else None
        loaded = getattr(sys.modules.get(name), "__file__", None) or path
        if found is not None and Path(found).resolve() == resolved == Path(loaded).resolve():
            return name
    return f"rloo_user_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"


def _callables(module: ModuleType) -> list[str]:
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
