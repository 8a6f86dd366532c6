"""Keys and certificates of a fleet: a certificate authority, the server's certificate, a key pair for every node.

ca.crt             give it to every node and to whoever submits runs
ca.key             signs server certificates; keep it off the server
server.crt, .key   the SuperLink's; valid for the hosts named
node-0, .pub       a node's private key stays on the node; register the .pub with the SuperLink
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfedgate.deploy import need_flower

DAYS = 365


def make(
    folder: str | Path, *, hosts: Sequence[str] = ("127.0.0.1", "localhost"), nodes: int = 3, days: int = DAYS
) -> Path:
    """Write what is missing into a folder; an authority that is there already signs again. Keys are never replaced."""
    need_flower()
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    if nodes < 0 or days < 1 or not hosts:
        raise ValueError("nodes is not negative, days at least 1, and the server needs a host")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if (place / "ca.key").exists():
        authority: Any = load_pem_private_key((place / "ca.key").read_bytes(), None)
        issuer = load_pem_x509_certificate((place / "ca.crt").read_bytes()).subject
    else:
        authority = ec.generate_private_key(ec.SECP384R1())
        issuer = _name("pfedgate fleet")
        _write(place / "ca.key", _private(authority), secret=True)
        _write(place / "ca.crt", _certificate(authority, authority, issuer, issuer, 10 * days, None))
    if not (place / "server.key").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write(place / "server.key", _private(key), secret=True)
        _write(place / "server.crt", _certificate(key, authority, _name(hosts[0]), issuer, days, hosts))
    for node in range(nodes):
        if not (place / f"node-{node}").exists():
            key = ec.generate_private_key(ec.SECP384R1())
            _write(place / f"node-{node}", _private(key, openssh=True), secret=True)
            _write(place / f"node-{node}.pub", _public(key))
    return place


def _name(common: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _certificate(key: Any, signer: Any, subject: Any, issuer: Any, days: int, hosts: Sequence[str] | None) -> bytes:
    """A server's certificate for these hosts; without hosts, that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import Encoding

    now = datetime.datetime.now(datetime.timezone.utc)
    authority = hosts is None
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=authority, crl_sign=authority,
                encipher_only=False, decipher_only=False, **usage,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )  # fmt: skip
    if hosts is not None:
        server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(server, critical=False).add_extension(names, critical=False)
    made: bytes = builder.sign(signer, SHA384()).public_bytes(Encoding.PEM)
    return made


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: Any, *, openssh: bool = False) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    made: bytes = key.private_bytes(Encoding.PEM, form, NoEncryption())
    return made


def _public(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    made: bytes = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return made + b"\n"


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """A new file, never over an old one; secrets are readable by their owner only, from the first moment."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
