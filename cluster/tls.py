"""Certificates of a fleet that spans machines: an authority of its own, and one certificate for each machine.

Ray checks that whoever it talks to has a certificate of this authority, on both sides. The authority's key stays in
the home of who brought the fleet up; each machine gets only its own key. They are made anew with each new head.
"""

import datetime
import ipaddress
import shutil
from pathlib import Path
from typing import Any

from cluster.errors import FleetError
from cluster.paths import private_dir, write_private

VALID = datetime.timedelta(days=825)
"""Longer than a fleet is up; the authority ends with it."""
SKEW = datetime.timedelta(days=2)
"""Clocks of other machines may be behind."""
FILES = ("node.crt", "node.key", "ca.crt")
"""What a machine has of it (ray_node.tls_environment)."""


def make_authority(folder: Path) -> None:
    """In `folder`, which is made anew: `ca.key` and `ca.crt`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    shutil.rmtree(folder, ignore_errors=True)
    private_dir(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Polyfleet fleet authority")])
    certificate = _signed(name, name, key.public_key(), key, [(x509.BasicConstraints(ca=True, path_length=0), True)])
    _write(folder, "ca", key, certificate)


def make_certificate(authority: Path, folder: Path, addresses: tuple[str, ...]) -> None:
    """In `folder`: `node.crt`, `node.key` and a copy of `ca.crt`, for a machine with these IP addresses.

    Ray's processes of one machine talk to each other over 127.0.0.1, which is in every certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        issuer_key = load_pem_private_key((authority / "ca.key").read_bytes(), password=None)
        issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    except (OSError, ValueError) as e:
        raise FleetError(
            f"the fleet's certificates in {authority} cannot be read: {e}", "`polyfleet down`, then `up`"
        ) from None
    private_dir(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    all_addresses = dict.fromkeys(("127.0.0.1", *addresses))
    named = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in all_addresses)]
    )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Polyfleet node")])
    certificate = _signed(name, issuer.subject, key.public_key(), issuer_key, [(named, False)])
    _write(folder, "node", key, certificate)
    write_private(folder / "ca.crt", (authority / "ca.crt").read_text())


def _signed(subject: Any, issuer: Any, public_key: Any, issuer_key: Any, extensions: list[tuple[Any, bool]]) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _write(folder: Path, name: str, key: Any, certificate: Any) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder / f"{name}.key", secret.decode())
    write_private(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM).decode())
