"""Ctrl-C at any time of a run: exit code 130, not a word, nothing half-written."""

import os
import random
import signal
import subprocess
import sys
import time

import damage
import pytest

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
RUNS = int(os.environ.get("MLX_MTP_EXAMPLES", 100)) if LONG else 3
START = """if True:
    import sys
    from mlx_mtp.__main__ import main
    print("up", file=sys.stderr, flush=True)
    main()
"""
COMMANDS = {
    "generate": ["generate", "-p", "abcab", "-m", "300", "--verbose", "False", "--model", "DIR"],
    "inspect": ["inspect", "DIR"],
    "draft-vocab": ["draft-vocab", "--model", "DIR", "--out", "OUT", "TEXT"],
}

CODES = (
    0,
    130,
    -signal.SIGINT,
)  # done already; the last, for a shell 130, too, where Python has ended and MLX has not


def start(command: list[str]) -> subprocess.Popen:
    """The command in a process that has just taken over from Python's own start."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", START, *command], text=True, **pipes)
    assert process.stderr
    assert process.stderr.readline() == "up\n"
    return process


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with a checkpoint and a text."""
    here = tmp_path_factory.mktemp("here")
    damage.put(here / "DIR", damage.build("step3p5", tmp_path_factory.mktemp("built")))
    (here / "TEXT").write_text("abcdef" * 10_000)
    return here


@pytest.mark.parametrize("name", COMMANDS if LONG else ["generate"])
def test_interrupted_at_any_time(here, name):
    command = [str(here / word) if word.isupper() else word for word in COMMANDS[name]]
    begun = time.monotonic()
    out, err = start(command).communicate(timeout=120)
    whole, chosen, codes = time.monotonic() - begun, random.Random(int(time.time()) if LONG else 5), set()
    files = sorted(here.rglob("*"))
    for _ in range(RUNS):
        process = start(command)
        after = chosen.uniform(0.002, whole)
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=120)
        assert process.returncode in CODES, (after, process.returncode, complaint)
        assert out.startswith(said) or process.returncode == 0, after
        assert err.startswith(complaint.rstrip("\n")), (after, complaint)  # click ends the line of "^C"
        assert sorted(here.rglob("*")) == files or name == "draft-vocab"
        assert not list(here.glob("*.part"))
        codes.add(process.returncode)
    assert 130 in codes, codes


FINALIZER = """if True:
    import os, signal, sys, time
    from mlx_mtp.__main__ import main
    from mlx_mtp.cli import main as group

    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
            sum(range(1000))

    @group.command(sys.argv[1])
    def command():
        Finalized()
        time.sleep(20)

    main()
"""


@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_within_a_finalizer_is_not_lost(sent, code):
    done = subprocess.run([sys.executable, "-c", FINALIZER, sent], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "", "")
