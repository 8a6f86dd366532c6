"""Install a wheel or an sdist into an empty environment and use it there as a stranger would.

    python scripts/release_check.py dist/pfedgate-0.2.0-py3-none-any.whl [--python python3.12] [--torch-from .venv]

Packages are taken from where pip usually takes them. `--torch-from` saves the download: dependencies are read from that
environment, and the checked file alone is installed anew. The commands run in an empty folder, with no path of the
repository in sight; the demo is the whole one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GATE = """
import torch, pfedgate
from pathlib import Path
assert "site-packages" in pfedgate.__file__, pfedgate.__file__
x = torch.randn(64, 1, 28, 28)
gated = pfedgate.gate(pfedgate.models.build("cnn_femnist", (1, 28, 28), 10), x, budget=0.3)
print(pfedgate.savings(gated, x))
"""


def main() -> None:
    """Make an environment, install, and run what the README names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the empty environment")
    parser.add_argument("--torch-from", type=Path, help="an environment whose packages are used, too")
    parser.add_argument("--quick", action="store_true", help="one round of the demo instead of all")
    options = parser.parse_args()
    file = options.file.resolve(strict=True)
    with tempfile.TemporaryDirectory(prefix="pfedgate-release-") as name:
        start, folder = time.monotonic(), Path(name)
        run = Commands(folder)
        run(options.python, "-m", "venv", folder / "venv")
        python = folder / "venv/bin/python"
        given = []
        if options.torch_from:
            place = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
            theirs = subprocess.check_output([options.torch_from / "bin/python", "-c", place], text=True).strip()
            ours = subprocess.check_output([python, "-c", place], text=True).strip()
            Path(ours, "dependencies.pth").write_text(theirs + "\n", encoding="utf-8")
            given = ["--no-deps"]
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *given, file)
        print(f"installed {file.name} in {time.monotonic() - start:.0f} s", flush=True)
        run(python, "-c", GATE)
        few = ["--set", "train.rounds=1"] if options.quick else []
        start = time.monotonic()
        run(folder / "venv/bin/pfedgate", "demo", "--out", "demo", *few)
        report = folder / "work/demo/report.html"
        assert report.stat().st_size > 500_000, f"{report} is too small to be a report"
        print(f"{file.name}: the demo took {time.monotonic() - start:.0f} s", flush=True)


class Commands:
    """Runs commands in an empty folder, without variables that could name the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PFEDGATE_DATA")
        self.environment = {key: value for key, value in os.environ.items() if key not in hidden}

    def __call__(self, *words: str | Path) -> None:
        """Run one; a failure ends everything."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        subprocess.run([str(word) for word in words], check=True, cwd=work, env=self.environment)


if __name__ == "__main__":
    main()
