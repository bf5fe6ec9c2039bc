"""Run the work on requests before they are queued: on few threads, in bounded memory, until their clients leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from ..machine.errors import with_type
from .departure import CURRENT, Departure, check_client
from .fields import Refused
from .limits import QueueFull

T = TypeVar("T")
SMALL = 1 << 16  # bytes of a body whose work does not wait for that of larger ones, and whose memory is not counted
MOST_BYTES = 256 * 10**6  # of the larger bodies that are being read or prepared
BUSY = "the server is reading other large requests; repeat the request later"


class Work(Departure):
    """The work on one request before it is queued."""

    def __init__(self, request: Request, pool: ThreadPoolExecutor):
        self._request, self._pool = request, pool

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, called on another thread, on which `check_client` checks this request's client.

        Raises ClientDisconnect once the client has left; the call then ends at its next check.
        """
        return await unless_gone(self._request, self._on_thread(function, *args))

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.wrap_future(self._pool.submit(self._called, function, *args))
        except asyncio.CancelledError:
            self.left = True
            raise

    def _called(self, function: Callable[..., T], *args: Any) -> T:
        CURRENT.set(self)
        check_client()
        try:
            return function(*args)
        except Exception:
            raise
        except BaseException as e:  # a panic of a Rust library is no Exception, and ASGI servers log its traceback
            raise Refused(f"the request cannot be prepared ({with_type(e)})") from None


class Preparations:
    """The threads for work on requests, and the memory of their bodies. active: number of requests being prepared."""

    def __init__(self):
        self._small = ThreadPoolExecutor(2, "mlx-mtp small requests")
        self._large = ThreadPoolExecutor(1, "mlx-mtp large requests")
        self.active, self.bytes = 0, 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Yield a request's body, whose memory counts until the block ends.

        most: maximum bytes. Raises Refused for a larger body (413), and for a large one without room (503).
        """
        chunks, size, counted = list[bytes](), 0, 0
        stated = request.headers.get("content-length", "")
        try:
            _check_size(int(stated) if stated.isdecimal() else 0, most)
            async for chunk in request.stream():
                size += len(chunk)
                _check_size(size, most)
                more = size - counted if size > SMALL else 0
                if self.bytes + more > MOST_BYTES:
                    raise Refused(BUSY, status=503)
                self.bytes, counted = self.bytes + more, counted + more
                chunks.append(chunk)
            content = b"".join(chunks)
            chunks.clear()
            yield content
        finally:
            self.bytes -= counted

    @contextlib.contextmanager
    def place(self, request: Request, size: int, queued: int, most: int):
        """Yield the `Work` of a request with a body of `size` bytes.

        queued: number of jobs in the queue. Raises QueueFull if these and the requests being prepared are `most`.
        """
        if queued + self.active >= most:
            raise QueueFull
        self.active += 1
        try:
            yield Work(request, self._large if size > SMALL else self._small)
        finally:
            self.active -= 1


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise Refused(f"the body is larger than {most} bytes; --max-body raises this", status=413)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects before, cancel it and raise ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
