"""Pictures are fetched from named hosts only: no redirects, no private addresses, limits of time and bytes."""

import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mlx_mtp.serve import fetch

BODY = b"pixels" * 100


class Host(BaseHTTPRequestHandler):
    """Answers /ok with BODY, /moved with a redirect to it, /slow with a byte every 20 ms, and else with 404."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["host"]))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/ok")
            self.end_headers()
        elif self.path.startswith(("/ok", "/slow")):
            self.send_response(200)
            self.end_headers()
            with suppress(ConnectionError):  # the client leaves a slow answer
                for i in range(len(BODY) if self.path == "/slow" else 1):
                    self.server.last = i
                    self.wfile.write(BODY if self.path != "/slow" else BODY[i : i + 1])
                    time.sleep(0.02 if self.path == "/slow" else 0)
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    server = HTTPServer(("127.0.0.1", 0), Host)
    server.asked, server.last = [], 0
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def here(host, monkeypatch):
    """Treat this machine as a public host; return its name with the port."""
    monkeypatch.setattr(fetch, "_is_public", lambda address: True)
    host.asked.clear()
    return f"localhost:{host.server_port}"


def got(url, hosts, most=10**4, seconds=5.0):
    return fetch.fetched(url, hosts, most, time.monotonic() + seconds)


def test_a_body_of_an_allowed_host_is_returned(host, here):
    assert got(f"http://{here}/ok?size=1", (here,)) == BODY
    assert host.asked == [("/ok?size=1", here)]


@pytest.mark.parametrize(
    ("path", "limits", "reason"),
    [
        ("/moved", {}, "302; redirects"),
        ("/none", {}, "404"),
        ("/ok", {"most": len(BODY) - 1}, "larger than"),
        ("/slow", {"seconds": 0.2}, "did not end within"),
    ],
)
def test_another_answer_is_refused(host, here, path, limits, reason):
    with pytest.raises(ValueError, match=reason):
        got(f"http://{here}{path}", (here,), **limits)
    assert [path for path, _ in host.asked] == [path]
    assert host.last < len(BODY) - 1  # it is left before its end


OTHER = {
    "another host": "http://example.com/a.png",
    "a host that begins alike": "http://example.org.evil.net/a.png",
    "a host below": "http://a.example.org/a.png",
    "another port": "http://example.org:8080/a.png",
    "https on another port": "https://example.org:80/a.png",
    "a user": "http://me@example.org/a.png",
    "the host as a user": "http://example.org@evil.net/a.png",
    "no host": "http:///a.png",
    "a space": "http://example.org/a b.png",
    "a line": "http://example.org/a\r\nHost: evil.net",
    "a port that is none": "http://example.org:99999999/",
    "no name": "http://[::1",
}


@pytest.mark.parametrize("name", OTHER)
def test_no_other_url_is_looked_up(monkeypatch, name):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("was looked up"))
    with pytest.raises(ValueError, match=r"not fetched|invalid"):
        got(OTHER[name], ("example.org",))


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "192.168.0.1",
    "172.16.0.1",
    "169.254.169.254",
    "0.0.0.0",
    "100.64.0.1",
    "224.0.0.1",
]
PRIVATE += ["::1", "fe80::1%lo", "fc00::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "::"]
PRIVATE += ["192.0.0.1", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "240.0.0.1"]
PRIVATE += ["255.255.255.255", "0.1.2.3", "64:ff9b::808:808", "64:ff9b:1::808:808", "fec0::1", "feff::1", "fdff::1"]
PRIVATE += ["2001:0:808:808::1", "::127.0.0.1", "::8.8.8.8", "::ffff:0:808:808", "::ffff:10.0.0.1", "2002:a00:1::"]
PRIVATE += ["2001:db8::1", "2001:10::1", "100::1", "3fff::1", "5f00::1", "ff02::1", "ff0e::1"]
PUBLIC = ["93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::"]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_not_connected_to(monkeypatch, address):
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))
    found = [public, (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("was connected"))
    with pytest.raises(ValueError, match="not public"):
        got("http://example.org/a.png", ("example.org",))


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_connected_to(monkeypatch, address):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 6, "", (address, 80))])
    monkeypatch.setattr(socket, "create_connection", lambda *given: asked.append(given[0]) or pytest.fail("done"))
    with pytest.raises(pytest.fail.Exception):
        got("http://example.org/a.png", ("example.org",))
    assert asked == [(address, 80)]


def test_a_look_up_that_does_not_end_is_given_up(monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ends.wait(5) and [])
    with pytest.raises(ValueError, match=r"download from example\.org did not end within"):
        got("http://example.org/a.png", ("example.org",), seconds=0.05)
    ends.set()


def test_a_host_without_an_address_is_refused(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"example.org failed \(gaierror\)"):
        got("http://example.org/a.png", ("example.org",))


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_checked_address_is_the_one_connected_to(host, here, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "_is_public", lambda address: asked.append(address) or True)
    real, looked = socket.getaddrinfo, []
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *more, **how: looked.append(name) or real(name, *more, **how)
    )
    assert got(f"http://{here}/ok", (here,)) == BODY
    assert looked[0] == "localhost"
    assert set(looked[1:]) <= set(asked)


def test_a_host_that_never_answers_and_one_without_tls_are_refused(monkeypatch):
    monkeypatch.setattr(fetch, "_is_public", lambda address: True)
    with listening() as port, pytest.raises(ValueError, match="did not end within"):
        got(f"http://127.0.0.1:{port}/", (f"127.0.0.1:{port}",), seconds=0.2)
    with listening() as port, pytest.raises(ValueError, match="did not end within"):
        got(f"https://127.0.0.1:{port}/", (f"127.0.0.1:{port}",), seconds=0.2)
    with pytest.raises(ValueError, match="failed"):
        got(f"http://127.0.0.1:{port}/", (f"127.0.0.1:{port}",))
