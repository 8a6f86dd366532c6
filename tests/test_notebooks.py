"""The notebooks of examples/ run from top to bottom, in a kernel and an empty folder."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="notebooks need the extra notebooks, which dev has")
    pytest.importorskip("ipykernel", reason="notebooks need the extra notebooks, which dev has")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    done = runpy.run_path(str(ROOT / "scripts" / "run-notebooks.py"))["execute"](path, tmp_path)
    assert not [out for cell in done.cells for out in cell.get("outputs", ()) if out.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_what_they_printed_and_say_how_to_install(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert "Colab" in "".join(cells[0]["source"])
    assert "%pip install" in "".join(cells[1]["source"])
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code" and "print(" in "".join(cell["source"]))
    assert str(Path.home()) not in path.read_text(encoding="utf-8")
