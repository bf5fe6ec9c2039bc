"""Let the work on a request end once its client has left."""

from contextvars import ContextVar

from starlette.requests import ClientDisconnect


class Departure:
    """Whether a client has left, which its connection sets, and the work of a thread checks by `check_client`."""

    left = False


CURRENT: ContextVar[Departure | None] = ContextVar("the client of this thread's work", default=None)


def check_client() -> None:
    """Raise ClientDisconnect if this thread does the work of a request whose client has left."""
    client = CURRENT.get()
    if client and client.left:
        raise ClientDisconnect
