"""The certificate of a head that members dial: signed by itself, and recognized by the fingerprint in their invites."""

import hashlib
import ssl
from datetime import UTC, datetime
from pathlib import Path

from tpuswarm.train.process.atomic import create_atomically

CERTIFICATE = "listen.pem"
"""File in the run's folder with the private key and the certificate, readable by its owner only."""
_VALID = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
"""The clock of a member may be wrong."""


def ensure_certificate(folder: Path) -> Path:
    """Return the file, creating it if it is missing."""
    path = folder / CERTIFICATE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        create_atomically(path, _make())  # another process may be first
    return path


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the certificate in a file, in hexadecimal."""
    text = path.read_text()
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") :]))


def fingerprint_of(der: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, in hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def _make() -> bytes:
    from cryptography import x509  # takes a tenth of a second to import
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tpuswarm")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_VALID)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
