"""What a server listens on, as the kernel tells it: nothing but the loopback address, whatever takes requests in."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

import pytest
from helpers_server import Server

pytestmark = [pytest.mark.ray, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

_LISTEN = "0A"  # TCP_LISTEN in the kernel's tables


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Of the kernel's form: 32-bit words in the machine's byte order, and the port, all in hexadecimal."""
    host, port = text.split(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, int(port, 16)


def listening(server: Server) -> dict[tuple[str, int], str]:
    """The (address, port) of every socket on which a process of the server takes TCP connections or UDP datagrams, and
    that process's command."""
    owners: dict[str, str] = {}
    for pid in [server.process.pid, *server.processes()]:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            target = str(link.readlink()) if link.is_symlink() else ""
            if target.startswith("socket:["):
                owners[target[8:-1]] = server.command(pid)
    found = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if inode in owners and (table.startswith("udp") or state == _LISTEN):
                address, port = _address(local)
                found[str(address), port] = owners[inode]
    return found


@pytest.mark.parametrize("kind", ["haproxy", "serve"])
def test_everything_listens_on_loopback(kind: str, server: Server, serves_proxy: Server) -> None:
    asked = server if kind == "haproxy" else serves_proxy
    assert asked.metrics().total("sluicegate_http_proxy_info", kind=kind) == 1
    sockets = listening(asked)
    public = sockets["127.0.0.1", asked.port]
    assert ("haproxy" in public) == (kind == "haproxy")
    open_to_others = {at: who for at, who in sockets.items() if not ipaddress.ip_address(at[0]).is_loopback}
    assert not open_to_others
