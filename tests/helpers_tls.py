"""Certificates for tests."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    cert: Path
    key: Path


def self_signed(folder: Path, name: str = "tls", from_days: int = -1, to_days: int = 2, password: str = "") -> Pair:
    """For localhost and 127.0.0.1, valid between two days counted from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = dt.datetime.now(dt.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + from_days * _DAY)
        .not_valid_after(now + to_days * _DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair = Pair(folder / f"{name}-cert.pem", folder / f"{name}-key.pem")
    pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    lock = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    return pair
