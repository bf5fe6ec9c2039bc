"""Check the command line on two ranks: which rank prints and reads, what is refused, and exit codes."""

import random
import signal
import sys
import time

import pytest
import rank_group
from command_line import call
from picture_requests import noise
from sweep import sweep

MAIN = [sys.executable, "-m", "mlx_mtp"]
pytestmark = sweep


def run(folder, *argv, stdin="", **env):
    return rank_group.ended(rank_group.start(2, folder, [*MAIN, *argv], **env), stdin)


def test_generate_prints_on_rank_0_alone(tmp_path):
    (code, text, _), others = run(tmp_path, "generate", "-p", "def f(n):", "-m", "12", "--quiet")
    assert (code, others) == (0, (0, "", ""))
    (_, plain, _), _ = run(tmp_path, "generate", "-p", "def f(n):", "-m", "12", "--quiet", "--num-draft-tokens", "0")
    assert text == plain != "\n"


def test_generate_reads_pictures_on_rank_0(tmp_path):
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, file in enumerate(files):
        file.write_bytes(noise(seed))
    argv = ["generate", "--model", "demo-vision", "-p", "What?", "-m", "8", "--quiet", "--image"]
    (code, text, _), others = run(tmp_path, *argv, *map(str, files))
    assert (code, others) == (0, (0, "", ""))
    assert text == call(*argv, *files).stdout != call(*argv, files[0]).stdout
    (first, _, error), (second, _, other) = run(tmp_path, *argv, str(files[0]), str(tmp_path / "none.png"))
    assert (first, second) == (2, 1)  # rank 0 has ended before the ranks are connected
    assert "picture 2" in error
    assert other.startswith("error: rank 1: ")


def test_a_chat_is_typed_on_rank_0(tmp_path):
    (code, text, _), others = run(
        tmp_path, "chat", "-m", "8", "--quiet", stdin="What is os.path?\nAnd then?\n/exit\n"
    )
    assert (code, others) == (0, (0, "", ""))
    assert len(text.splitlines()) >= 2


@pytest.mark.parametrize(("argv", "code", "message"), [
    (["generate", "-p", "-"], 2, "error: --prompt -: standard input has no end on several ranks"),
    (["inspect", "."], 2, "error: inspect is for a single process; on several ranks use generate"),
    (["bench", "kernels"], 2, "error: kernels is for a single process; on several ranks use decode"),
    (["generate", "--model", "/nowhere"], 1, "error: /nowhere: no such directory"),
    (["generate", "--adapter-path", "a"], 2, "adapter_path=a: not on 2 ranks"),
])  # fmt: skip
def test_errors_are_printed_once_or_with_the_rank(tmp_path, argv, code, message):
    (first, _, text), (second, out, other) = run(tmp_path, *argv)
    assert (first, second, out) == (code, code, "")
    assert message in text
    assert other == "" if code == 2 else all(line.startswith("error: rank 1: ") for line in other.splitlines())


def test_lossless_is_verified_together(tmp_path):
    (code, text, _), others = run(tmp_path, "verify-lossless", "-m", "3", "--draws", "20", "--no-diagnose")
    assert (code, others) == (0, (0, "", ""))
    assert "on 2 ranks; on another number of them near-ties may be decided otherwise" in text


def test_it_is_tested_together_whether_a_model_sees(tmp_path):
    argv = ["--model", "demo-vision", "-m", "1", "--draws", "20", "--no-diagnose", "--num-draft-tokens", "1"]
    (code, text, _), others = run(tmp_path, "verify-lossless", *argv, "--no-prompt-lookup")
    assert (code, others) == (0, (0, "", ""))
    assert "sees: 12 of 12 opposite pairs" in text


@pytest.mark.parametrize(("sent", "victim", "code", "message"), [
    (signal.SIGKILL, 1, 1, "error: rank 0: rank 1 has ended"),
    (signal.SIGSTOP, 1, 1, "error: rank 0: rank 1 has not answered for 3.5 s"),
    (signal.SIGSTOP, 0, 1, "error: rank 1: rank 0 has not answered for 3.5 s"),
    (signal.SIGINT, 0, 130, ""),
])  # fmt: skip
def test_a_rank_that_dies_hangs_or_gets_ctrl_c_ends_all_at_any_time(tmp_path, sent, victim, code, message):
    seconds = random.uniform(1, 12)
    ranks = rank_group.start(2, tmp_path, [*MAIN, "bench", "decode", "--rounds", "50"], MLX_MTP_RANK_SECONDS="5")
    time.sleep(seconds)
    ranks[victim].send_signal(sent)
    other = ranks[1 - victim]
    _, stderr = other.communicate(timeout=60)
    if "not started within 15 s" not in stderr:  # the signal was sent before the ranks were connected
        assert other.returncode == code, (seconds, stderr)
        assert message in stderr, seconds
    ranks[victim].kill()


def test_each_rank_keeps_its_part_of_a_prompt_cache(tmp_path):
    file, text = tmp_path / "cache", "def first(n):\n    return n\n\ndef second(n):\n    return"
    (code, _, error), others = run(tmp_path, "cache-prompt", "-p", text, "--prompt-cache-file", str(file), "--quiet")
    assert (code, error, others) == (0, "", (0, "", ""))
    parts = sorted(path.name for path in tmp_path.glob("cache*"))
    assert parts == ["cache", "cache.rank1"]
    argv = ["generate", "-m", "8", "--quiet", "--prompt-cache-file", str(file)]
    (code, cached, _), others = run(tmp_path, *argv, "-p", " n + 1")
    assert (code, others) == (0, (0, "", ""))
    assert cached == run(tmp_path, "generate", "-m", "8", "--quiet", "-p", f"{text} n + 1")[0][1]
    (tmp_path / "cache.rank1").write_bytes(file.read_bytes())
    code, _, error = run(tmp_path, *argv, "-p", " n + 1")[1]
    assert code == 1
    assert "cache.rank1: made on rank 0 of 2; expected 1 of 2" in error
