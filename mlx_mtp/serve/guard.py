"""Reject requests by API key, Host, Origin, and form of the body."""

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .fields import Refused

UNTYPED = "/api/"  # clients of this API may send another content type, such as curl's default, or none
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

    def check(self, path: str, method: str, headers: Headers) -> None:
        """Raise Refused for headers that violate the rules.

        Host and Origin: 403. The key, except for paths in OPEN and below /page/: 401. A POST of another content type
        than application/json: 415; below /api/ only with an Origin, which browsers send with every POST.
        """
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
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json" and (origin or not path.startswith(UNTYPED)):
            raise Refused(f"content-type {kind[:80]!r}: allowed is application/json", status=415)

    def has_key(self, headers: Headers) -> bool:
        """Return whether a request has the API key, or none is required."""
        if self.key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        return hmac.compare_digest(given.encode(), self.key.encode())


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


class Guard:
    """ASGI middleware that rejects requests that violate `Rules`, with the response `refused(request, error)`."""

    def __init__(self, app: ASGIApp, rules: Rules, refused: Any):
        self.app, self.rules, self.refused = app, rules, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                self.rules.check(path, scope["method"], Headers(scope=scope))
            except Refused as e:
                return await self.refused(Request(scope), e)(scope, receive, send)
        return await self.app(scope, receive, send)
