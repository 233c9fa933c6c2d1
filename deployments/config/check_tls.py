"""What is wrong with the TLS files of a config, found by a handshake in memory before any server starts."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CERT, KEY, PASSWORD, CA = "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"


def tls_problems(http: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key of http_options, what is wrong), each fault once. Keys that are absent or no strings are passed over."""
    faults = [
        (key, why) for key in (CERT, KEY, CA) if isinstance(http.get(key), str) and (why := _unreadable(http[key]))
    ]
    if faults:
        yield from faults
        return
    cert, key, ca = http.get(CERT), http.get(KEY), http.get(CA)
    if (cert is None) != (key is None):
        missing, given = (CERT, KEY) if cert is None else (KEY, CERT)
        yield missing, f"is missing: {given} alone does not turn TLS on"
    if isinstance(ca, str) and not _has_certificate(ca):
        yield CA, f"holds no certificate in PEM form: {ca}"
    if isinstance(cert, str) and isinstance(key, str):
        password = http.get(PASSWORD)
        found = _pair_problem(cert, key, password if isinstance(password, str) else None)
        if found is not None:
            yield found


def _unreadable(file: str) -> str | None:
    if not Path(file).is_absolute():
        return f"must be an absolute path, because Serve reads it in processes of its own, got {file!r}"
    try:
        with Path(file).open("rb"):
            return None
    except FileNotFoundError:
        return f"no such file: {file}"
    except OSError as error:
        return f"cannot read {file}: {error.strerror or error}"


def _has_certificate(file: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        return False
    return True


def _pair_problem(cert: str, key: str, password: str | None) -> tuple[str, str] | None:
    if not _has_certificate(cert):
        return CERT, f"holds no certificate in PEM form: {cert}"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key, lambda: password or "")  # without one, OpenSSL would ask at the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            return KEY, f"is not the private key of {CERT}: {key}"
        if b"ENCRYPTED" in Path(key).read_bytes():
            return (PASSWORD, f"does not open {KEY}") if password else (KEY, f"is encrypted: {PASSWORD} is missing")
        return KEY, f"holds no private key in PEM form: {key}"
    match _verify_error(server, cert):  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
        case 10:
            return CERT, f"has expired: {cert}"
        case 9:
            return CERT, f"is not valid yet: {cert}"
    return None


def _verify_error(server: ssl.SSLContext, cert: str) -> int | None:
    """OpenSSL's code for why a client that trusts this very certificate refuses it, or None."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    try:
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return int(error.verify_code)
    return None
