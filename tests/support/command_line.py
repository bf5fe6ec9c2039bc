"""Run the command line in a new process or, faster, in this one; look up commands and their flags."""

import logging
import os
import signal
import socket
import subprocess
import sys
import warnings

import click
from click.testing import CliRunner

from mlx_mtp.cli import main


def run(*args, stdin="", **env):
    """Run the command line in a new process; return the completed process."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_mtp", *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
    )


def call(*args, stdin=""):
    """Run the command line in this process; return a completed process as `run` does.

    Does not cover imports, streams that are files, and the interpreter's exit.
    """
    terminated, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("transformers")
    level, log = logger.level, logging.getLogger("mlx_mtp.serve")
    logged = log.level, log.propagate, log.handlers
    try:
        with warnings.catch_warnings():
            result = CliRunner().invoke(main, [*map(str, args)], input=stdin, catch_exceptions=False)
    finally:
        signal.signal(signal.SIGTERM, terminated)
        logger.setLevel(level)
        log.setLevel(logged[0])
        log.propagate, log.handlers = logged[1:]
    return subprocess.CompletedProcess(args, result.exit_code, result.stdout, result.stderr)


def one_line_error(result, code=1):
    """Return the error of a completed process, which must be the single and last line of stderr."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert result.stderr.splitlines()[-1] == lines[0]
    return lines[0]


def free_port():
    """Return a port of 127.0.0.1 that no process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command_of(words):
    """Return the click command that a list of words calls, and the remaining words."""
    found = main
    while isinstance(found, click.Group):
        found, words = found.commands[words[0]], words[1:]
    return found, words


def flags(command):
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}
