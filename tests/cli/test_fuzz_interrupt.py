"""Press Ctrl-C at any time of a run: exit code 130, no output, no partial file."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import damage
import pytest
import results
from fuzzing import LONG, count, tree
from sweep import sweep

RUNS = count(1, 100)
START = """if True:
    import sys
    from mlx_mtp.__main__ import main
    print("up", file=sys.stderr, flush=True)
    main()
"""
DIR = ["--model", "DIR"]
FEW = ["--draws", "50", "-m", "2", "--no-diagnose"]
BENCH = ["bench", "decode", "--rounds", "1", "-m", "2", "--categories", "code_python", "--contexts", "300,400"]
COMMANDS = {  # OUT is the file they write
    "generate": ["generate", "-p", "abcab", "-m", "300", "--verbose", "False", *DIR],
    "inspect": ["inspect", "DIR"],
    "draft-vocab": ["draft-vocab", *DIR, "--out", "OUT", "TEXT"],
    "convert": ["convert", "--hf-path", "DIR", "--mlx-path", "OUT"],
    "cache-prompt": ["cache-prompt", *DIR, "--prompt-cache-file", "OUT", "-p", "abcabd" * 99],
    "verify-lossless": ["verify-lossless", *DIR, *FEW],
    "bench decode": [*BENCH, *DIR, "--out", "OUT"],
    "bench plot": ["bench", "plot", "RESULT", "--html", "OUT"],
}
SAME = ("generate", "inspect", "draft-vocab", "convert")  # equal output every time; the others print times

CODES = (0, 130, -signal.SIGINT)  # 0: already done; -SIGINT: after Python's end, before MLX's, a shell's 130 too


def start(command: list[str]) -> subprocess.Popen:
    """Start the command in a process that has just finished Python's own start."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", START, *command], text=True, **pipes)
    assert process.stderr
    assert process.stderr.readline() == "up\n"
    return process


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with a checkpoint, a text and a result."""
    here = tmp_path_factory.mktemp("here")
    damage.put(here / "DIR", damage.build("step3p5", tmp_path_factory.mktemp("built")))
    (here / "TEXT").write_text("abcdef" * 10_000)
    (here / "RESULT").write_text(json.dumps(results.decode_result()))
    return here


def written(here) -> object:
    """Return the constant part of the command's output file, and delete the file."""
    out = here / "OUT"
    if out.is_dir():
        found = tree(out)
        shutil.rmtree(out)
    elif out.exists():
        found = json.loads(text)["format"] if (text := out.read_bytes()).startswith(b'{"bench"') else len(text)
        out.unlink()
    else:
        found = None
    return found


@sweep
@pytest.mark.parametrize("name", COMMANDS if LONG else ["convert"])
def test_interrupted_at_any_time(here, name):
    command = [str(here / word) if word.isupper() else word for word in COMMANDS[name]]
    files, begun = tree(here), time.monotonic()
    out, err = start(command).communicate(timeout=120)
    lasts, whole = time.monotonic() - begun, written(here)
    chosen, codes = random.Random(int(time.time()) if LONG else 5), set()
    for run in range(10 * RUNS):
        if run >= RUNS and 130 in codes:
            break
        process = start(command)
        after = chosen.uniform(0.002, lasts)
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        printed, complaint = process.communicate(timeout=120)
        assert process.returncode in CODES, (after, process.returncode, complaint)
        assert name not in SAME or out.startswith(printed) or process.returncode == 0, after
        assert err.startswith(complaint.rstrip("\n")), (after, complaint)  # click ends the line of "^C"
        assert written(here) in ([whole] if process.returncode == 0 else [whole, None]), after
        assert tree(here) == files, after
        codes.add(process.returncode)
        lasts = after if process.returncode == 0 else lasts  # the first run may have been slow on a busy machine
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
