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
    """NONCE_BYTES random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def client_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The proof that the gateway sends."""
    return _proof(secret, _CLIENT, server_nonce, client_nonce)


def server_proof(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The proof that the replica sends."""
    return _proof(secret, _SERVER, server_nonce, client_nonce)


def proves(given: object, wanted: bytes) -> bool:
    """Whether `given`, which may be anything that the peer sent, is the proof `wanted`; compared in constant time."""
    return isinstance(given, bytes) and hmac.compare_digest(given, wanted)


def is_nonce(given: object) -> bool:
    """Whether what the peer sent can be a nonce."""
    return isinstance(given, bytes) and len(given) == NONCE_BYTES


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + server_nonce + client_nonce, hashlib.sha256)
