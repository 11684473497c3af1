"""Certificates and keys for a federation on one machine, made on the spot. Knows cryptography."""

from __future__ import annotations

import datetime
import ipaddress
import logging
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

log = logging.getLogger("apiece")

_DAYS = 30
_told: set[Path] = set()


def certify(folder: Path, host: str = "127.0.0.1") -> None:
    """ca.crt, and server.crt and server.key signed by it, for `host`; the authority's own key is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "apiece federation")])
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = (
        _certificate(root, root, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    server = (
        _certificate(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]), root, own)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.crt").write_bytes(server.public_bytes(pem))
    _private(folder / "server.key", own, serialization.PrivateFormat.PKCS8)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def make_key(path: Path) -> Path:
    """A client's key pair, as `ssh-keygen -t ecdsa -b 384` makes it; the public half is returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _private(path, key, serialization.PrivateFormat.OpenSSH)
    public = path.with_name(path.name + ".pub")
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(key.public_key().public_bytes(*form) + b"\n")
    return public


def _private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def names(folder: Path) -> dict[str, str]:
    """Public keys, in the form that Flower shows them in → names, of the files NAME.pub in a folder.

    A file that is no such key is left out, and told once: a running federation goes on.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("it is of another kind")
            form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            text = key.public_bytes(*form).decode()
            if text in found:
                raise ValueError(f"{found[text]}.pub is the same key")
            found[text] = path.stem
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            if path not in _told:
                log.warning("%s is left out: %s. Make it with ssh-keygen -t ecdsa -b 384", path, error)
            _told.add(path)
    return found
