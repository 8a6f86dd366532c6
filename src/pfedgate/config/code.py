"""Functions in files of one's own, which a recipe names as FILE.py:FUNCTION.

    [model] name = "my_model.py:build"      likewise data.name, task.loss, task.metrics and run.callbacks

A relative path counts from the recipe's folder. Reading a recipe or making a report never runs such a file; training
and exporting do, and say so. `pfedgate --no-code …` or PFEDGATE_NO_CODE=1 forbids it: for recipes and runs of others.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pfedgate.core.errors import RecipeError, unknown, warn

FORBID = "PFEDGATE_NO_CODE"
FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)(?:#(?P<digest>[0-9a-f]{16}))?")
MISSING: Any = object()  # an argument without a default
# Where a recipe may name code: section and key.
PLACES = (("data", "name"), ("model", "name"), ("task", "loss"), ("task", "metrics"), ("run", "callbacks"))


@dataclass(frozen=True)
class Code:
    """A function in a file, loaded when it is called; equal ones are equal, in every process."""

    file: str
    name: str
    digest: str = ""  # of the file as it was when the run began; empty: whatever it holds
    given: tuple[tuple[str, Any], ...] = ()  # further keyword arguments of every call

    @classmethod
    def of(cls, text: str, **given: Any) -> Code:
        """The function that a text such as "my_model.py:build" names.

        >>> Code.of("my_model.py:build", width=3)
        Code(file='my_model.py', name='build', digest='', given=(('width', 3),))
        """
        match = FORM.fullmatch(text)
        if match is None:
            raise RecipeError(f"{text!r}: code is named FILE.py:FUNCTION, such as my_model.py:build")
        return cls(match["file"], match["name"], match["digest"] or "", tuple(sorted(given.items())))

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself."""
        return _loaded(self.file, self.name, self.digest)

    def __call__(self, *values: Any, **more: Any) -> Any:
        function = self.function
        try:
            return function(*values, **dict(self.given), **more)
        except Exception as error:
            raise RecipeError(f"{self.name} of {self.file} failed: {type(error).__name__}: {error}") from error

    @property
    def __name__(self) -> str:
        """What a metric is called."""
        return self.name

    @property
    def higher(self) -> bool:
        """Whether more of a metric is better: unless the function has an attribute that denies it."""
        return bool(getattr(self.function, "higher", True))


def is_code(text: Any) -> bool:
    """Whether a value of a recipe names a function in a file.

    >>> is_code("my_model.py:build"), is_code("resnet"), is_code("my_model.py")
    (True, False, False)
    """
    return isinstance(text, str) and FORM.fullmatch(text) is not None


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a function or class and their defaults, read without running the file.

    An argument whose default is no plain value, such as a class, cannot be set in a recipe and is left out.
    """
    code = Code.of(text)
    try:
        tree = ast.parse(_bytes(code.file))
    except SyntaxError as error:
        raise RecipeError(f"{code.file}, line {error.lineno}: {error.msg}") from None
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = {
        t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
    }
    if code.name in assigned:
        return {}
    if code.name not in defined:
        raise RecipeError(f"{code.file}: {unknown('function', code.name, {*defined, *assigned})}")
    found: ast.AST | None = defined[code.name]
    skip = 0
    if isinstance(found, ast.ClassDef):
        inner = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        found, skip = next(inner, None), 1
    if not isinstance(found, ast.FunctionDef):
        return {}
    names = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args)][skip:]
    plain = found.args.defaults
    pairs = [*zip(names, [*[None] * (len(names) - len(plain)), *plain], strict=False)]
    pairs += [
        (argument.arg, node) for argument, node in zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    ]
    values: dict[str, Any] = {}
    for name, node in pairs:
        try:
            values[name] = MISSING if node is None else ast.literal_eval(node)
        except ValueError:
            continue
    return values


def beside(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The tables of a recipe in this folder, with the files of its code as absolute paths."""

    def whole(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [whole(item) for item in value]
        return str((folder / Path(value).expanduser()).resolve()) if is_code(value) else value

    changed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tables.items()}
    for section, key in PLACES:
        part, dotted = changed.get(section), f"{section}.{key}"
        if isinstance(part, str):
            changed[section] = whole(part)
        elif isinstance(part, dict) and key in part:
            part[key] = whole(part[key])
        if dotted in changed:
            changed[dotted] = whole(changed[dotted])
    return changed


def named(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All code that a recipe's tables name."""
    values = [tables.get(section, {}).get(key) for section, key in PLACES]
    each = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [str(item) for item in dict.fromkeys(each) if is_code(item)]


def digest(file: str | Path) -> str:
    """Sixteen digits that another content would not have."""
    return hashlib.sha256(_bytes(file)).hexdigest()[:16]


def _bytes(file: str | Path) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise RecipeError(f"no code in {file}: {error.strerror}") from None


def _loaded(file: str, name: str, wanted: str) -> Callable[..., Any]:
    module = _module(file, wanted)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"{file}: {unknown('function', name, (n for n, v in vars(module).items() if callable(v)))}")
    return function  # type: ignore[no-any-return]


@cache  # a run's code stays what it was when it began, even if the file is edited meanwhile
def _module(file: str, wanted: str) -> ModuleType:
    if os.environ.get(FORBID, "0") not in ("", "0"):
        raise RecipeError(f"the recipe names code, {file}, and code is forbidden here (--no-code or {FORBID})")
    now = digest(file)
    if wanted and now != wanted:
        raise RecipeError(f"{file} has changed since the run began: its digest is {now}, not {wanted}")
    if multiprocessing.parent_process() is None:
        warn(f"this recipe runs code: {file}")
    spec = importlib.util.spec_from_file_location(f"pfedgate_code_{now}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RecipeError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    return module
