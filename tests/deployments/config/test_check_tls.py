"""Every way in which TLS files can be wrong is one clear line before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers_tls import self_signed

from deployments.config.check_tls import tls_problems
from deployments.config.serve_file import ConfigFileError, ServeFile, problems, read_config

EXAMPLE = str(Path(__file__).parents[3] / "cluster_configs/tls.yaml")


def found(**http: object) -> list[tuple[str, str]]:
    return list(tls_problems({f"ssl_{key}": str(value) for key, value in http.items()}))


def test_a_good_pair_has_no_faults(tmp_path: Path) -> None:
    pair, locked = self_signed(tmp_path), self_signed(tmp_path, "locked", password="open")
    assert found(certfile=pair.cert, keyfile=pair.key) == []
    assert found(certfile=pair.cert, keyfile=pair.key, ca_certs=locked.cert) == []
    assert found(certfile=locked.cert, keyfile=locked.key, keyfile_password="open") == []
    assert found() == []


def test_dates(tmp_path: Path) -> None:
    old, new = self_signed(tmp_path, "old", -3, -1), self_signed(tmp_path, "new", 1, 3)
    assert found(certfile=old.cert, keyfile=old.key) == [("ssl_certfile", f"has expired: {old.cert}")]
    assert found(certfile=new.cert, keyfile=new.key) == [("ssl_certfile", f"is not valid yet: {new.cert}")]


def test_wrong_keys(tmp_path: Path) -> None:
    a, b, locked = (self_signed(tmp_path, name, password=name * (name == "c")) for name in "abc")
    assert found(certfile=a.cert, keyfile=b.key) == [
        ("ssl_keyfile", f"is not the private key of ssl_certfile: {b.key}")
    ]
    assert found(certfile=locked.cert, keyfile=locked.key) == [
        ("ssl_keyfile", "is encrypted: ssl_keyfile_password is missing")
    ]
    assert found(certfile=locked.cert, keyfile=locked.key, keyfile_password="no") == [
        ("ssl_keyfile_password", "does not open ssl_keyfile")
    ]
    assert found(certfile=a.cert, keyfile=a.cert) == [("ssl_keyfile", f"holds no private key in PEM form: {a.cert}")]
    assert found(certfile=a.cert) == [("ssl_keyfile", "is missing: ssl_certfile alone does not turn TLS on")]
    assert found(keyfile=a.key) == [("ssl_certfile", "is missing: ssl_keyfile alone does not turn TLS on")]


def test_wrong_files(tmp_path: Path) -> None:
    pair, other = self_signed(tmp_path), tmp_path / "other"
    other.write_text("not a certificate")
    assert found(certfile=other, keyfile=pair.key) == [("ssl_certfile", f"holds no certificate in PEM form: {other}")]
    assert found(certfile=pair.cert, keyfile=pair.key, ca_certs=other) == [
        ("ssl_ca_certs", f"holds no certificate in PEM form: {other}")
    ]
    assert found(certfile=pair.cert, keyfile="/none/key") == [("ssl_keyfile", "no such file: /none/key")]
    assert found(certfile=tmp_path, keyfile=pair.key) == [("ssl_certfile", f"cannot read {tmp_path}: Is a directory")]
    [(key, why)] = found(certfile="cert.pem", keyfile=pair.key)
    assert key == "ssl_certfile" and "absolute" in why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_key(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    pair.key.chmod(0)
    assert found(certfile=pair.cert, keyfile=pair.key) == [
        ("ssl_keyfile", f"cannot read {pair.key}: Permission denied")
    ]


def test_the_example_is_valid_with_files_of_yours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(problem).partition(": ")[0] for problem in problems(read_config(EXAMPLE))] == [
        "http_options.ssl_certfile",
        "http_options.ssl_keyfile",
    ]
    pair = self_signed(tmp_path)
    sets = [f"http.ssl_certfile={pair.cert}", f"http.ssl_keyfile={pair.key}"]
    ServeFile.load(EXAMPLE, sets)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigFileError, match="without TLS"):
        ServeFile.load(EXAMPLE, sets)
