"""What a key looks like, and what is kept of it.

`sk-sg-PREFIX-RANDOM`: the prefix is no secret, it finds the row and names the key in lists; the random part has 256
bits. Kept is HMAC-SHA256 under the pepper of the database, over a salt of the key's own and the whole secret. A slow
password hash would add nothing: nobody searches 2^256 secrets however fast the hash, and a gateway hashes on every
cache miss.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string

_PREFIX_CHARS = string.ascii_lowercase + string.digits
_RANDOM_CHARS = string.ascii_letters + string.digits
_RANDOM_LENGTH = 43  # log2(62) * 43 = 256.03 bits
_SECRET = re.compile(r"sk-sg-([a-z0-9]{12})-[A-Za-z0-9]{43}\Z")


def new_secret() -> str:
    """A new key, which nobody can guess."""
    prefix = "".join(secrets.choice(_PREFIX_CHARS) for _ in range(12))
    return f"sk-sg-{prefix}-{''.join(secrets.choice(_RANDOM_CHARS) for _ in range(_RANDOM_LENGTH))}"


def prefix_of(secret: str) -> str | None:
    """None: no key of ours can look like this."""
    match = _SECRET.match(secret)
    return match[1] if match else None


def new_salt() -> str:
    """A new salt for digest(), in hex."""
    return secrets.token_hex(16)


def digest(secret: str, salt: str, pepper: str) -> str:
    """What is kept of the secret. `salt` and `pepper` are hex."""
    return hmac.new(bytes.fromhex(pepper), bytes.fromhex(salt) + secret.encode(), hashlib.sha256).hexdigest()


def matches(secret: str, salt: str, pepper: str, known: str) -> bool:
    """Takes the same time wherever the digests differ."""
    return hmac.compare_digest(digest(secret, salt, pepper), known)
