"""TLS certificates of a fleet that spans machines: an authority, and one certificate per machine.

On both sides of a connection, Ray checks that the peer has a certificate of this authority. The authority's key stays
in the home of the user who runs `polyfleet up`; each machine gets only its own key. All are created again with each new
head.
"""

import datetime
import ipaddress
import shutil
from pathlib import Path
from typing import Any

from cluster.errors import FleetError
from cluster.paths import private_dir, write_private

VALIDITY = datetime.timedelta(days=825)
"""Validity of a certificate, longer than a fleet is up; the authority is removed with the fleet."""
SKEW = datetime.timedelta(days=2)
"""Certificates are valid from this long before their creation on: clocks of other machines may be behind."""
FILES = ("node.crt", "node.key", "ca.crt")
"""Files that a machine gets (ray_node.tls_environment)."""


def make_authority(folder: Path) -> None:
    """Create an authority, `ca.key` and `ca.crt`, in `folder`, which is removed first."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    shutil.rmtree(folder, ignore_errors=True)
    private_dir(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Polyfleet fleet authority")])
    certificate = _signed(name, name, key.public_key(), key, [(x509.BasicConstraints(ca=True, path_length=0), True)])
    _write(folder, "ca", key, certificate)


def make_certificate(authority: Path, folder: Path, addresses: tuple[str, ...]) -> None:
    """Write `node.crt`, `node.key` and `ca.crt` to `folder`, for a machine with these IP addresses.

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
            f"the fleet's certificates in {authority} cannot be read: {e}",
            "run `polyfleet down`, then `polyfleet up`: it creates them again",
        ) from None
    private_dir(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    all_addresses = dict.fromkeys(("127.0.0.1", *addresses))
    alternative_names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(address)) for address in all_addresses)]
    )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Polyfleet node")])
    certificate = _signed(name, issuer.subject, key.public_key(), issuer_key, [(alternative_names, False)])
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
        .not_valid_after(now + VALIDITY)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _write(folder: Path, name: str, key: Any, certificate: Any) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder / f"{name}.key", secret.decode())
    write_private(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM).decode())
