"""How each end proves to the other that it knows a replica's secret, without sending it.

The server sends a nonce, the client its own and an HMAC over both, the server an HMAC in return. The two proofs differ
in who makes them, so that neither can be played back to its maker.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
_CLIENT, _SERVER = b"sluicegate gateway", b"sluicegate replica"


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return _proof(secret, _CLIENT, server_nonce, client_nonce)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return _proof(secret, _SERVER, server_nonce, client_nonce)


def proves(given: object, wanted: bytes) -> bool:
    """In constant time; `given` is whatever the peer sent."""
    return isinstance(given, bytes) and hmac.compare_digest(given, wanted)


def is_nonce(given: object) -> bool:
    return isinstance(given, bytes) and len(given) == NONCE_BYTES


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + server_nonce + client_nonce, hashlib.sha256)
