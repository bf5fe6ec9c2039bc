"""Reject requests by API key, Host, Origin, and form of the body."""

import hmac
import ipaddress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .fields import Refused

UNTYPED = "/api/"  # clients of this API may send another content type, such as curl's default, or none
SAFE_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}  # of all responses
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
OPEN = ("/", "/health")  # paths that need no key; nor do the page's files


@dataclass(frozen=True)
class Rules:
    """Conditions that `check` and `read_body` require of a request.

    key:  the API key; None: not required. hosts: allowed host names besides localhost and IP addresses.
    origins: allowed origins of web pages besides the server's own, "*" for all. body: maximum bytes.
    """

    key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body: int = 32 * 2**20

    def __post_init__(self):
        key = self.key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError("the API key (--api-key): allowed is printable ASCII that is not empty or within spaces")

    def check(self, path: str, method: str, headers: Headers) -> None:
        """Raise Refused for headers that violate the rules.

        Both a content length and a transfer encoding: 400. Host and Origin: 403. The key, except for paths in OPEN
        and below /page/: 401. A POST of another content type than application/json: 415; below /api/ only with an
        Origin, which browsers send with every POST. A POST that is compressed or in another charset than UTF-8: 415.
        """
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Refused("both content-length and transfer-encoding are given; send one")
        host = host_of(headers.get("host", ""))
        if not (host in ("localhost", *self.hosts) or _is_address(host)):
            raise Refused(f"host {host[:80]!r} is not this server's; --allow-host adds it", status=403)
        origin = headers.get("origin", "")
        is_same = origin.partition("://")[2] == headers.get("host")
        if origin and not is_same and origin not in self.origins and "*" not in self.origins:
            raise Refused(f"origin {origin[:80]!r} is not allowed; --cors-origin adds it", status=403)
        if not (path in OPEN or path.startswith("/page/") or self.has_key(headers)):
            raise Refused(
                "the API key is missing or wrong; send it as a bearer token", status=401, code="invalid_api_key"
            )
        if method == "POST":
            _check_form(headers, typed=bool(origin) or not path.startswith(UNTYPED))

    def has_key(self, headers: Headers) -> bool:
        """Return whether a request has the API key, or none is required."""
        if self.key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        return hmac.compare_digest(given.encode(), self.key.encode())


def _check_form(headers: Headers, *, typed: bool) -> None:
    """Raise Refused (415) for a body that is compressed or in another charset; if `typed`, also unless it is JSON."""
    kind, *parameters = headers.get("content-type", "").split(";")
    if typed and kind.strip().lower() != "application/json":
        raise Refused(f"content-type {kind[:80]!r}: allowed is application/json", status=415)
    for name, _, value in (each.partition("=") for each in parameters):
        if name.strip().lower() == "charset" and value.strip(" \t\"'").lower() not in CHARSETS:
            raise Refused(f"content-type: charset {value[:80]!r}: allowed is utf-8", status=415)
    for coding in ",".join(headers.getlist("content-encoding")).split(","):
        if coding.strip().lower() not in ("", "identity"):
            raise Refused(f"content-encoding {coding.strip()[:80]!r}: send the body without compression", status=415)


def host_of(header: str) -> str:
    """Return the host in a Host header, in lower case, without port, brackets and final dots; "" if malformed."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class SafeHeaders:
    """ASGI middleware that adds SAFE_HEADERS to each response."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, partial(_send_safe, send) if scope["type"] == "http" else send)


async def _send_safe(send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        MutableHeaders(scope=message).update(SAFE_HEADERS)
    await send(message)


class RootPath:
    """ASGI middleware that serves below a path prefix, whether or not a proxy has stripped it."""

    def __init__(self, app: ASGIApp, root: str):
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.root:
            within = scope["path"] == self.root or scope["path"].startswith(f"{self.root}/")
            path = scope["path"].removeprefix(self.root) if within else scope["path"]
            scope.update(root_path=self.root, path=self.root + (path or "/"))
        await self.app(scope, receive, send)


class RequestGuard:
    """ASGI middleware that answers a request that violates its rules with `refused(request, error)`."""

    def __init__(self, app: ASGIApp, rules: Rules, refused: Any):
        self.app, self.rules, self.refused = app, rules, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                self.rules.check(path, scope["method"], Headers(scope=scope))
            except Refused as e:
                response = self.refused(Request(scope), e)
                if e.status == 400:  # of an ambiguous length: what follows may be a hidden request
                    response.headers["connection"] = "close"
                return await response(scope, receive, send)
        return await self.app(scope, receive, send)
