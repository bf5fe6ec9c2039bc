"""Run a program at each login: write, load and remove an agent of launchd (macOS) or a unit of systemd (Linux)."""

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine.atomic import write_whole
from ..machine.errors import first_line

NAME = "mlx-mtp"
PRIVATE = 0o600  # only the user reads a unit: its environment may contain keys
PAUSE = 10  # seconds before a program that has failed is started again
STOPS = 60.0  # seconds to wait for an earlier agent's end
UNQUOTED = r"[\w@+=:,./-]+"  # words that systemd reads unchanged, without quotes


@dataclass(frozen=True)
class Program:
    """A program that launchd or systemd runs at each login, and again after a failure.

    command: the program's absolute path, then its arguments. environment: variables added to those that launchd or
    systemd sets. stop: seconds from SIGTERM until SIGKILL when the program is ended.
    """

    command: list[str]
    environment: dict[str, str]
    stop: int


class Launchd:
    """The agent NAME of the user's launchd.

    file: its property list. log: the file of the program's output. reading: a shell command that shows the output.
    """

    def __init__(self) -> None:
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{NAME}.plist"
        self.log = Path.home() / "Library" / "Logs" / f"{NAME}.log"
        self.reading = f"tail -f {shlex.quote(str(self.log))}"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{NAME}"

    def write(self, program: Program) -> None:
        """Write the property list, or replace it, readable by the user alone; used at the next `load`.

        Raises ValueError if `program` has a control character other than tab and line breaks.
        """
        content: dict[str, Any] = {
            "Label": NAME,
            "ProgramArguments": program.command,
            "EnvironmentVariables": program.environment,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": PAUSE,
            "ExitTimeOut": program.stop,
            "ProcessType": "Interactive",  # the default limits an agent's processor and disk use
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        text = plistlib.dumps(content)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, text, mode=PRIVATE)

    def load(self) -> None:
        """Start the program of `file` now and at each login; an agent that is loaded is ended before.

        Raises ValueError if launchctl is missing or fails, or if the earlier agent has not ended after STOPS seconds.
        """
        self._end()
        _call("launchctl", "enable", self._target)  # `launchctl disable` would otherwise outlast the file
        _call("launchctl", "bootstrap", self._domain, str(self.file))

    def remove(self) -> None:
        """End the program, if the agent is loaded, and delete the property list.

        Raises ValueError if launchctl is missing, or the agent has not ended after STOPS seconds; the property list
        is deleted then, too.
        """
        try:
            self._end()
        finally:
            self.file.unlink(missing_ok=True)

    def _end(self) -> None:
        """Unload the agent, if it is loaded, and wait for its end: until then launchd refuses to load it again.

        Raises ValueError if it has not ended after STOPS seconds, or if launchctl is missing.
        """
        until = time.monotonic() + STOPS
        if self._is_loaded():
            _call("launchctl", "bootout", self._target, checked=False)  # fails if the end takes time
            while self._is_loaded():
                if time.monotonic() > until:
                    raise ValueError(f"launchctl bootout {self._target}: the agent still runs after {STOPS:.0f} s")
                time.sleep(0.2)

    def _is_loaded(self) -> bool:
        return _call("launchctl", "print", self._target, checked=False) == 0


class Systemd:
    """The unit NAME of the user's systemd. file: its file. reading: a shell command that shows its output."""

    def __init__(self) -> None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self.file = config / "systemd" / "user" / f"{NAME}.service"
        self.reading = f"journalctl --user -u {NAME} -f"

    def write(self, program: Program) -> None:
        """Write the unit's file, or replace it, readable by the user alone; used at the next `load`."""
        command = " ".join(_systemd_word(word).replace("$", "$$") for word in program.command)
        environment = (_systemd_word(f"{name}={value}") for name, value in program.environment.items())
        lines = [
            "[Unit]",
            "Description=mlx-mtp serve",
            "[Service]",
            *(f"Environment={word}" for word in environment),
            f"ExecStart={command}",
            "Restart=on-failure",
            f"RestartSec={PAUSE}",
            f"TimeoutStopSec={program.stop}",
            "[Install]",
            "WantedBy=default.target",
        ]
        write_whole(self.file, "\n".join(lines) + "\n", mode=PRIVATE)

    def load(self) -> None:
        """Start the program of `file` now and at each login; the unit's running program is ended before.

        Raises ValueError if systemctl is missing or fails.
        """
        _call("systemctl", "--user", "daemon-reload")
        _call("systemctl", "--user", "stop", self.file.name)
        _call("systemctl", "--user", "enable", "--now", self.file.name)

    def remove(self) -> None:
        """End the program and delete the unit's file.

        Raises ValueError if systemctl is missing or fails; the file is deleted then, too.
        """
        try:
            _call("systemctl", "--user", "disable", "--now", self.file.name)
        finally:
            self.file.unlink(missing_ok=True)
        _call("systemctl", "--user", "daemon-reload")


def manager() -> Launchd | Systemd:
    """Return a `Launchd` on macOS, and a `Systemd` on any other system."""
    return Launchd() if sys.platform == "darwin" else Systemd()


def _systemd_word(word: str) -> str:
    """Return a word quoted and escaped for a unit's file; for ExecStart= the caller also doubles each dollar."""
    if re.fullmatch(UNQUOTED, word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + re.sub(r"[\x01-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'


def _call(*words: str, checked: bool = True) -> int:
    """Run a command and return its exit code.

    Raises ValueError, with one line, if its program is not found or, with `checked`, if the exit code is not 0.
    """
    if shutil.which(words[0]) is None:
        raise ValueError(f"{words[0]}: not found")
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if checked and done.returncode:
        why = first_line(RuntimeError(done.stderr.strip() or f"exit code {done.returncode}"))
        raise ValueError(f"{' '.join(words)}: {why}")
    return done.returncode
