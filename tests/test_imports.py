"""Imports point one way only, and the core does not need the extras (design: arrows between modules)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pfedgate

ROOT = Path(pfedgate.__file__).parent

# A room may import those on lower floors. Rooms of one floor do not know each other.
FLOORS = [
    {"core"},
    {"gating", "data", "models", "fleet"},
    {"training"},
    {"algorithms"},
    {"engine"},
    {"config"},
    {"runs"},
    {"experiment", "theory"},
    {"novel"},
    {"deploy", "report", "export"},
    {"tune"},
    {"studies"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}

# What `gating` may use beside the standard library and itself: it knows nothing of federated learning.
GATING = {"torch", "numpy"}
SHARED = {"pfedgate.core.errors", "pfedgate.core"}

EXTRAS = (
    "flwr", "datasets", "pyarrow", "PIL", "optuna", "wandb", "mlflow", "tensorboard", "onnx",
    "onnxruntime", "executorch", "matplotlib", "sklearn", "vl_convert", "psutil", "trustme", "ray", "opacus",
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
    """`pfedgate.gating.splitters` -> `gating`; the package itself -> ''."""
    return ".".join(module.split(".")[1:2])


def violations(path: Path, source: str) -> list[str]:
    module, tree = module_of(path), ast.parse(source)
    own = part_of(module)
    wrong = []
    for name, line in imports(tree, module, path.name == "__init__.py"):
        ours = name.split(".")[0] == "pfedgate"
        target = part_of(name) if ours else None
        where = f"{module}:{line} imports {name}"
        if own == "gating":
            shared = any(name == room or name.startswith(f"{room}.") for room in SHARED - {"pfedgate.core"})
            if ours and target != own and not shared:
                wrong.append(f"{where}: of this package gating may use pfedgate.core.errors only")
            elif not ours and name.split(".")[0] not in GATING | sys.stdlib_module_names:
                wrong.append(f"{where}: gating may use only {sorted(GATING)}")
        elif own in RANK and target in RANK and own != target and RANK[target] >= RANK[own]:
            wrong.append(f"{where}: {target} is not below {own}")
    return sorted(set(wrong))


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_downwards(path: Path) -> None:
    assert not violations(path, path.read_text(encoding="utf-8"))


def test_no_file_name_occurs_twice() -> None:
    counts = Counter(path.name for path in sources() if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(ROOT).with_suffix("").parts[0] for path in sources()} - {"__init__", "__main__"}
    assert rooms == set(RANK)


def test_errors_need_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "core" / "errors.py").read_text(encoding="utf-8"))
    used = {target.split(".")[0] for target, _ in imports(tree, "pfedgate.core.errors", False)}
    assert used <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("wrong", "file", "source"),
    [
        (True, "core/types.py", "from pfedgate.engine.server import run"),
        (True, "core/types.py", "from .. import engine"),
        (True, "algorithms/fedavg.py", "from ..engine.server import run"),
        (True, "engine/endpoint.py", "import pfedgate.deploy.flower"),
        (True, "engine/server.py", "def f():\n    from pfedgate import report"),
        (True, "data/pool.py", "from pfedgate.models import build"),
        (True, "gating/gate/network.py", "from pfedgate.core.types import State"),
        (True, "gating/gate/network.py", "import scipy"),
        (True, "gating/gate/network.py", "from pfedgate import gate"),
        (True, "gating/__init__.py", "from ..training.fit import fit"),
        (False, "cli/base.py", "from pfedgate import engine, report"),
        (False, "gating/gate/network.py", "from . import norms\nfrom numpy.linalg import norm\nimport math"),
        (False, "gating/__init__.py", "from pfedgate.gating import wrap\nfrom pfedgate.core.errors import unknown"),
        (False, "algorithms/__init__.py", "from .fedavg import FedAvg\nfrom pfedgate.gating import wrap"),
    ],
)
def test_the_check_sees_wrong_arrows_only(wrong: bool, file: str, source: str) -> None:
    assert bool(violations(ROOT / file, source)) == wrong


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


def loaded(statement: str, *modules: str) -> list[str]:
    """Which of these modules a fresh process has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*[name for name in {modules!r} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout.split()


def test_rooms_are_loaded_when_they_are_used() -> None:
    assert loaded("import pfedgate.models, pfedgate.cli", *EXTRAS) == []
    heavy = ("torch", "pfedgate.engine.server", "pfedgate.experiment", "sklearn", "scipy")
    assert loaded("import pfedgate", *heavy) == []
    assert loaded("import pfedgate.cli", *heavy) == []
    assert loaded("import pfedgate.gating; pfedgate.gate", *heavy) == ["torch"]
    assert loaded("from pfedgate.config.methods import methods; assert methods()", "pfedgate.engine") == []
    # The compiler takes two seconds to load, in every worker and for every message of a Flower node.
    step = "import pfedgate.experiment as e; e.run(train={'rounds': 1}, algorithm='pfedgate', run={'workers': 1})"
    assert loaded(step, "torch._dynamo", "torch._inductor") == []
    assert loaded("import pfedgate; pfedgate.run", *heavy[:3]) == list(heavy[:3])


def test_the_public_face_lists_and_finds_its_names() -> None:
    assert set(pfedgate.__all__) <= set(dir(pfedgate))
    assert all(getattr(pfedgate, name) is not None for name in pfedgate.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'gates'"):
        pfedgate.gates  # noqa: B018


def test_every_class_variable_has_a_type() -> None:
    # On Python 3.10 typing.get_type_hints raises for a plain ClassVar.
    plain = [
        str(path) for path in ROOT.rglob("*.py") if re.search(r": ClassVar\s*(=|$)", path.read_text("utf-8"), re.M)
    ]
    assert plain == []
