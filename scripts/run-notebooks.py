"""Execute the notebooks of examples/notebooks and keep what they print; needs the extra `notebooks`.

python scripts/run-notebooks.py            write the outputs into the files
python scripts/run-notebooks.py --check    only execute them, in a folder of their own: what CI does
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times differ in every run
    return notebook


def main() -> None:
    """Execute all of them, each in an empty folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    check = parser.parse_args().check
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as name:
            done = execute(path, Path(name))
        if not check:
            nbformat.write(done, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in done.cells)} cells ran")


if __name__ == "__main__":
    main()
