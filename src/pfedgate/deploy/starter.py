"""The files a fleet starts from: a ready app for Flower, and the keys and certificates of server and nodes.

ca.crt             give it to every node and to whoever submits runs
ca.key             signs server certificates; keep it off the server
server.crt, .key   the SuperLink's; valid for the hosts named
node-0, .pub       a node's private key stays on the node; register the .pub with the SuperLink
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pfedgate import __version__
from pfedgate.config import recipe as config
from pfedgate.deploy import need_flower
from pfedgate.runs import folder as runfolder

PACKAGE = "pfedgate_app"
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    f"{PACKAGE}/__init__.py": "init.py.in",
    f"{PACKAGE}/server.py": "server.py.in",
    f"{PACKAGE}/client.py": "client.py.in",
}
_CODE = re.compile(r"""(["'])([^"'\n]+\.py:\w+)\1""")
FLEET, DAYS = "pfedgate fleet", 365


def write_app(folder: str | Path, recipe: str | Path | None = None) -> Path:
    """Write a small app into a new or empty folder; the recipe is checked first, and copied as it is.

    Files of code that it names come with it, named with their digests, and so do its tuned settings.
    """
    place, copies = Path(folder), dict[str, Path]()
    if place.exists() and any(place.iterdir()):
        raise FileExistsError(f"{place} is not empty: choose another folder")
    if recipe is None:
        text = _template("recipe.toml.in")
    else:
        source = Path(recipe).expanduser()
        names, copies = runfolder.copies(config.resolve(source))
        text = _CODE.sub(lambda match: _renamed(match, source.parent, names), source.read_text(encoding="utf-8"))
        if (tuned := config.tuned_path(source)).exists():
            copies["recipe.tuned.toml"] = tuned
    name = re.sub(r"[^a-z0-9]+", "-", place.resolve().name.lower()).strip("-") or "pfedgate-app"
    for path, template in FILES.items():
        content = _template(template).replace("@NAME@", name).replace("@VERSION@", __version__)
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(content, encoding="utf-8")
    (place / PACKAGE / "recipe.toml").write_text(text, encoding="utf-8")
    for name, copied in copies.items():
        (place / PACKAGE / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(copied, place / PACKAGE / name)
    return place


def _renamed(match: re.Match[str], folder: Path, names: Mapping[str, str]) -> str:
    name = names.get(str((folder / Path(match[2]).expanduser()).resolve()))
    return match[0] if name is None else f"{match[1]}{name}{match[1]}"


def _template(name: str) -> str:
    return resources.files("pfedgate.deploy").joinpath("templates", name).read_text(encoding="utf-8")


def make_keys(
    folder: str | Path, *, hosts: Sequence[str] = ("127.0.0.1", "localhost"), nodes: int = 3, days: int = DAYS
) -> Path:
    """Write the keys and certificates that a folder lacks. An existing authority signs again; no key is replaced."""
    need_flower("trustme")
    import trustme
    from cryptography.hazmat.primitives.asymmetric import ec

    if nodes < 0 or days < 1 or not hosts:
        raise ValueError("nodes is not negative, days at least 1, and the server needs a host")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if (place / "ca.key").exists():
        authority = trustme.CA.from_pem((place / "ca.crt").read_bytes(), (place / "ca.key").read_bytes())
    else:
        # trustme is made for tests and names its certificates so by default; these are named for what they are.
        authority = trustme.CA(path_length=0, organization_name=FLEET, organization_unit_name="authority")
        _write(place / "ca.key", authority.private_key_pem.bytes(), secret=True)
        _write(place / "ca.crt", authority.cert_pem.bytes())
    if not (place / "server.key").exists():
        end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
        server = authority.issue_cert(
            *hosts, common_name=hosts[0], organization_name=FLEET, organization_unit_name="server", not_after=end
        )
        _write(place / "server.key", server.private_key_pem.bytes(), secret=True)
        _write(place / "server.crt", server.cert_chain_pems[0].bytes())
    for node in range(nodes):
        if not (place / f"node-{node}").exists():
            private, public = _pair(ec.generate_private_key(ec.SECP384R1()))
            _write(place / f"node-{node}", private, secret=True)
            _write(place / f"node-{node}.pub", public)
    return place


def _pair(key: Any) -> tuple[bytes, bytes]:
    """A node's key pair in the form that `flower-supernode` and `flwr supernode register` read."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """A new file, never over an old one; secrets are readable by their owner only, from the first moment."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
