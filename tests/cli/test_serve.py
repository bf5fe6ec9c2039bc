"""Run `mlx-mtp serve` as users do: it says where it is, answers, and ends with exit code 0; errors are one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from command_line import call, one_line_error


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP], ids=["told to", "its terminal is closed"])
def test_it_answers_and_ends_in_order(tmp_path, sent):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "mlx_mtp", "serve", "--port", str(port), "--log-file", log, "--alias", "*"]
    command += ["--prompt-cache-dir", tmp_path / "prompts"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
    try:
        lines = []
        while not lines or not lines[-1].startswith("curl"):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        assert any(f"http://127.0.0.1:{port}" in line for line in lines)
        body = {"model": "anything", "messages": [{"role": "user", "content": "word " * 70}], "max_tokens": 2}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        until = time.monotonic() + 20
        while True:
            try:
                answer = json.load(urllib.request.urlopen(request))
                break
            except OSError:  # it listens a moment after
                assert time.monotonic() < until
                time.sleep(0.05)
        assert answer["usage"]["completion_tokens"] <= 2
        server.send_signal(sent)
        if sent == signal.SIGHUP:  # once more when the terminal's shell has ended
            time.sleep(0.05)
            server.send_signal(sent)
        assert server.wait(20) == 0
    finally:
        server.kill()
    assert "Traceback" not in server.stderr.read()
    assert "first after" in log.read_text()
    assert list((tmp_path / "prompts").iterdir())


def test_a_model_that_cannot_load_ends_it_with_one_line(tmp_path):
    one_line_error(call("serve", "--model", tmp_path, "--port", free_port()))


def test_a_port_in_use_is_one_line():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        result = call("serve", "--port", s.getsockname()[1])
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: 127.0.0.1:")


def test_off_loopback_it_wants_a_key():
    assert "--api-key" in one_line_error(call("serve", "--host", "0.0.0.0"), code=2)
