"""Fetch a picture from an allowed host: no redirects, no private addresses, limited in time and bytes."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import SplitResult, urlsplit

SECONDS = 10.0  # for all pictures of a request together
PORTS = {"http": 80, "https": 443}
CHUNK = 1 << 16
# Not in every Python's table of private addresses, or able to lead to a private IPv4 address that they contain.
REFUSED = [
    ipaddress.ip_network(each)
    for each in (
        "::/96",  # IPv4-compatible
        "::ffff:0:0:0/96",  # IPv4-translated (SIIT)
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # local NAT64
        "2001::/32",  # Teredo
        "fec0::/10",  # site-local
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
        "192.88.99.0/24",  # 6to4 relays
    )
]


def fetched(url: str, hosts: tuple[str, ...], most: int, until: float) -> bytes:
    """Return the body of the response to a GET of an http(s) URL.

    hosts: allowed "host", on the scheme's own port only, or "host:port". most: maximum bytes. until: time.monotonic()
    at which the look-up of the host, or the connection, is given up. Raises ValueError for a URL that is invalid or
    not allowed, a host with an address that is not public, a status other than 200, a larger body, and a look-up or
    connection that fails or is given up.
    """
    parts, port = _checked(url, hosts)
    host = parts.hostname or ""
    try:
        address = _address(host, port, until)
        plain = socket.create_connection((address, port), max(0.01, until - time.monotonic()))
        with plain, _ended(plain, until), contextlib.closing(_connection(parts, port, plain)) as connection:
            return _body(connection, parts, most, until)
    except (OSError, http.client.HTTPException) as e:
        late = time.monotonic() >= until or isinstance(e, TimeoutError)
        limit = f"did not end within {SECONDS:.0f} seconds, the limit of all pictures of a request together"
        why = limit if late else f"failed ({type(e).__name__})"
        raise ValueError(f"the download from {host} {why}") from None


def _checked(url: str, hosts: tuple[str, ...]) -> tuple[SplitResult, int]:
    """Return the parts of a URL and its port. hosts: as in `fetched`.

    Raises ValueError for an invalid URL or another host, and for a URL with a user name, a space, or a character that
    is not printable ASCII.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError("the URL is invalid") from None
    allowed = f"{host}:{port}" in hosts or (host in hosts and port == PORTS[parts.scheme])
    if not allowed or parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(
            f"this URL of host {host[:80]!r}, port {port}, is not fetched; send a data: URL. Allowed are hosts of "
            "the server's --fetch-images HOST[:PORT], in URLs of printable ASCII without spaces and user name"
        )
    return parts, port


def _address(host: str, port: int, until: float) -> str:
    """Return the first IP address of a host.

    Raises ValueError unless all its addresses are public, OSError without any, and TimeoutError if they are not found
    before `until`, a time.monotonic(). The look-up then ends on a thread of its own, since the system has no way to
    cancel it.
    """
    entries: Future[list[Any]] = Future()
    threading.Thread(target=_look_up, args=(host, port, entries), daemon=True).start()
    found = [str(entry[4][0]) for entry in entries.result(max(0.01, until - time.monotonic()))]
    if not all(_is_public(address) for address in found):
        raise ValueError(f"host {host[:80]!r} has an address that is not public; nothing is fetched from it")
    return found[0]


def _look_up(host: str, port: int, entries: Future[list[Any]]) -> None:
    """Set the result of `entries` to what `socket.getaddrinfo` returns, or its exception to what that raises."""
    try:
        entries.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as e:
        entries.set_exception(e)


def _is_public(address: str) -> bool:
    """Return whether an IP address, and the IPv4 address in a mapped or 6to4 one, are global, unicast and direct."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = (found.ipv4_mapped or found.sixtofour) if isinstance(found, ipaddress.IPv6Address) else None
    refused = found.is_multicast or any(found in network for network in REFUSED)
    return not refused and found.is_global and (inner is None or _is_public(str(inner)))


@contextlib.contextmanager
def _ended(connected: socket.socket, until: float) -> Iterator[None]:
    """Return a context that shuts a connection down if its block still runs at `until`, a time.monotonic().

    A socket's timeout would start again with each piece.
    """
    twin = connected.dup()  # TLS detaches the socket itself
    timer = threading.Timer(max(0.01, until - time.monotonic()), _shut_down, [twin])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        twin.close()


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _connection(parts: SplitResult, port: int, plain: socket.socket) -> http.client.HTTPConnection:
    """Return an HTTP or HTTPS connection over a connected socket, so that the host is not looked up again."""
    connection = http.client.HTTPConnection(parts.hostname or "", port)
    if parts.scheme == "https":
        connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
    else:
        connection.sock = plain
    return connection


def _body(connection: http.client.HTTPConnection, parts: SplitResult, most: int, until: float) -> bytes:
    connection.request("GET", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"its host answers with status {response.status}; redirects are not followed")
    found = bytearray()
    while piece := response.read1(CHUNK):
        found += piece
        if len(found) > most:
            raise ValueError(f"larger than {most / 1e6:.0f} MB")
    if time.monotonic() >= until:
        raise TimeoutError
    return bytes(found)
