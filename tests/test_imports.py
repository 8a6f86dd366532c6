"""Imports point one way only, and the core does not need the extras (design: arrows between modules)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pfedgate

ROOT = Path(pfedgate.__file__).parent

# A module may import those on lower layers, and its own layer where that is a package of its own.
LAYERS = [
    {"types"},
    {"tensors"},
    {"local"},
    {"algorithm"},
    {"algorithms"},
    {"engine"},
    {"exchange", "deploy"},
    {"report"},
    {"studies"},  # its pages and figures are painted by the report
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# What `gating` may use beside the standard library and itself. Of this package only `names`, which words error
# messages, knows nothing of federated learning and imports nothing but the standard library (checked below).
GATING = {"torch", "numpy", "ortools"}
SHARED = {"names"}

EXTRAS = (
    "flwr", "datasets", "pyarrow", "PIL", "optuna", "tomlkit", "wandb", "mlflow", "tensorboard", "onnx",
    "onnxruntime", "matplotlib", "sklearn",
)  # fmt: skip


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = ("pfedgate", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every module a file names in an import, at any depth, relative ones resolved, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            yield base, node.lineno
            # `from pfedgate import engine` imports a module as well.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def typing_only(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`: names for the type checker, no import at run time."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            lines.update(line for child in node.body for line in range(child.lineno, (child.end_lineno or 0) + 1))
    return lines


def part_of(module: str) -> str:
    """`pfedgate.gating.blocks` -> `gating`; the package itself -> ''."""
    return ".".join(module.split(".")[1:2])


def violations(path: Path, source: str) -> list[str]:
    module, tree = module_of(path), ast.parse(source)
    own = part_of(module)
    wrong = []
    for name, line in imports(tree, module, path.name == "__init__.py"):
        target = part_of(name) if name.split(".")[0] == "pfedgate" else None
        where = f"{module}:{line} imports {name}"
        if own == "gating":
            allowed = target in {"gating"} | SHARED
            outside = target is None and name.split(".")[0] not in GATING | sys.stdlib_module_names
            if outside or (target is not None and not allowed):
                wrong.append(f"{where}: gating may use only {sorted(GATING | SHARED)}")
        elif own in RANK and target in RANK and own != target and RANK[target] >= RANK[own]:
            wrong.append(f"{where}: {target} is not below {own}")
    return sorted(set(wrong))


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_downwards(path: Path) -> None:
    assert not violations(path, path.read_text(encoding="utf-8"))


def reached(part: str, direct: dict[str, set[str]]) -> set[str]:
    """The ranked parts that `part` comes to through any number of parts without a rank."""
    found: set[str] = set()
    seen, ahead = {part}, [part]
    while ahead:
        for target in direct.get(ahead.pop(), set()) - seen:
            seen.add(target)
            if target in RANK:
                found.add(target)
            else:
                ahead.append(target)
    return found


def test_modules_without_a_rank_are_no_way_round() -> None:
    """Every module beside the named ones (seeds, schedule, …) may be used anywhere, but smuggles nothing upwards."""
    direct: dict[str, set[str]] = {}
    for path in sources():
        module, tree = module_of(path), ast.parse(path.read_text(encoding="utf-8"))
        skipped = typing_only(tree)
        targets = {
            part_of(name)
            for name, line in imports(tree, module, path.name == "__init__.py")
            if name.startswith("pfedgate.") and line not in skipped
        }
        direct.setdefault(part_of(module), set()).update(targets - {""})
    wrong = {
        f"{part} reaches {target}" for part in RANK for target in reached(part, direct) if RANK[target] > RANK[part]
    }
    assert not wrong


def test_the_way_round_is_seen() -> None:
    assert reached("types", {"types": {"seeds"}, "seeds": {"store"}, "store": {"engine"}}) == {"engine"}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_gating_shares_needs_only_the_standard_library(name: str) -> None:
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    used = {target.split(".")[0] for target, _ in imports(tree, f"pfedgate.{name}", False)}
    assert used <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types.py", "from pfedgate.engine import run"),
        ("types.py", "from . import engine"),
        ("algorithms/fedavg.py", "from ..engine import run"),
        ("exchange/inprocess.py", "import pfedgate.deploy.flower"),
        ("engine.py", "def f():\n    from pfedgate import report"),
        ("gating/gate.py", "from pfedgate.types import State"),
        ("gating/gate.py", "import scipy"),
        ("gating/gate.py", "from pfedgate import gate"),
        ("gating/__init__.py", "from ..local import fit"),
    ],
)
def test_the_check_sees_a_wrong_arrow(file: str, source: str) -> None:
    assert violations(ROOT / file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli.py", "from pfedgate import engine, report"),
        ("gating/gate.py", "from . import norm\nfrom ortools.algorithms import x\nimport math"),
        ("gating/__init__.py", "from pfedgate.gating import blocks\nfrom pfedgate.names import unknown"),
        ("algorithms/__init__.py", "from .fedavg import FedAvg\nfrom pfedgate.gating import gated"),
    ],
)
def test_the_check_accepts_right_arrows(file: str, source: str) -> None:
    assert not violations(ROOT / file, source)


def test_extras_are_never_imported_at_the_top_of_a_module() -> None:
    wrong = []
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        ignored = typing_only(tree)
        top = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.Try)], [])
        for name, line in imports(top, module_of(path), path.name == "__init__.py"):
            if name.split(".")[0] in EXTRAS and line not in ignored:
                wrong.append(f"{module_of(path)}:{line} imports {name} at the top")
    assert not wrong


def test_import_of_the_core_loads_no_extra() -> None:
    """In a fresh process, because this one has loaded much already."""
    code = (
        "import sys, importlib.util as u, pfedgate\n"
        "import pfedgate.models\n"
        "if u.find_spec('pfedgate.cli'): import pfedgate.cli\n"
        f"print(*[name for name in {EXTRAS!r} if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
