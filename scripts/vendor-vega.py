"""Fetch the three scripts that draw a report's charts from the npm registry, and check their digests.

    python scripts/vendor-vega.py            # writes src/pfedgate/report/assets/*.min.js and their licences
    python scripts/vendor-vega.py --check    # only compares the files there with the digests below

The versions are those inside vl-convert-python, so that a page and a file draw alike. To update: change the
versions, run it once, and copy the digests that the error message names.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src/pfedgate/report/assets"
# Package: version, and the sha256 of its minified script. All are BSD-3-Clause.
PACKAGES = {
    "vega": ("6.2.0", "ea6a5936381d06f912466354e2b6a20eb66c4d41f1ca9dff1e0236dfee6ee392"),
    "vega-lite": ("6.4.1", "6d5035fdd429b4bc6f91f3754426c3f516f3dbd8e08b105cfc2496bed4ebd254"),
    "vega-embed": ("7.0.2", "c7111a41190080938b14c1de00074d9bda16ef2199e2919dd038cddf97d87354"),
}


def check(name: str, script: bytes) -> None:
    """Refuse a script that is not the one named above."""
    version, digest = PACKAGES[name]
    actual = hashlib.sha256(script).hexdigest()
    if actual != digest:
        raise SystemExit(f"{name}@{version}: expected sha256 {digest}, got {actual}")


def fetch(name: str) -> None:
    """Write the script and the licence of a package."""
    version, _ = PACKAGES[name]
    with urllib.request.urlopen(f"https://registry.npmjs.org/{name}/-/{name}-{version}.tgz") as reply:
        archive = io.BytesIO(reply.read())
    with tarfile.open(fileobj=archive) as package:
        script, licence = (package.extractfile(f"package/{path}") for path in (f"build/{name}.min.js", "LICENSE"))
        assert script is not None
        assert licence is not None
        content = script.read()
        check(name, content)
        (ASSETS / f"{name}.min.js").write_bytes(content)
        (ASSETS / f"{name}.LICENSE.txt").write_bytes(licence.read())


if __name__ == "__main__":
    for package in PACKAGES:
        if "--check" in sys.argv[1:]:
            check(package, (ASSETS / f"{package}.min.js").read_bytes())
        else:
            fetch(package)
