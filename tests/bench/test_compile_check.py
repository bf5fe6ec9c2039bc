"""Check `doctor --compile-only`: a text that is refused, hangs or crashes affects no other text or the report."""

import json
import sys
import time

import command_line
import mlx.core as mx
import pytest
from metal_cases import linux_only
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.bench import compile_check, compile_child, compile_jobs
from mlx_mtp.bench.compile_check import CompileCheck, is_good, lines
from mlx_mtp.bench.compile_jobs import OPS, job_of, launches, probe, types_of
from mlx_mtp.kernels import _quantized

# A child that compiles nothing: a job's name determines its result; a process that it starts writes its id.
CHILD = """
import json, os, subprocess, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    name, dtypes = job["name"], job["call"]["output_dtypes"]
    if name == "hangs":
        print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, file=open(sys.argv[1], "w"), flush=True)
        time.sleep(600)
    if name == "crashes":
        os.abort()
    if name == "exits":
        sys.exit("out of registers")
    refused = name == "refused" or (name == "probe" and "bfloat16" in dtypes)
    answer = {"refused": "in file\\nx:1: error: no such type" if refused else None}
    print(json.dumps({**answer, "most_threads": {"few": 384, "wide": 1024}.get(name)}), flush=True)
"""


def job(name, dtype="float32"):
    return {**probe(dtype), "name": name}


def check_of(tmp_path, *jobs, limit=20.0):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "pids")]
    return CompileCheck(jobs, tmp_path / "report.json", limit, command)


def quiet(*_):
    pass


def read(tmp_path):
    return json.loads((tmp_path / "report.json").read_text())


@pytest.fixture(autouse=True)
def _no_metal_needed(monkeypatch):
    monkeypatch.setattr(compile_check, "zig", lambda: "zig")


def ended(pid):
    """Return whether a process ends within some seconds."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@linux_only
def test_hangs_and_crashes_are_reported_and_the_rest_continues(tmp_path):
    names = ["a", "hangs", "b", "crashes", "exits", "refused", "c"]
    found = check_of(tmp_path, *map(job, names), limit=1.0).run(quiet)
    statuses = ["compiled", "hung", "compiled", "crashed", "crashed", "refused", "compiled"]
    assert [text["status"] for text in found["texts"]] == statuses
    assert found == read(tmp_path)
    assert found["finished"]
    assert found["counts"] == {"compiled": 3, "hung": 1, "crashed": 2, "refused": 1}
    messages = [text.get("message", "") for text in found["texts"]]
    assert messages[1] == "killed after 1 s"
    assert "SIGABRT" in messages[3]
    assert "exit code 1; out of registers" in messages[4]
    assert not is_good(found)
    assert all(ended(pid) for pid in (tmp_path / "pids").read_text().split())
    shown = "\n".join(lines(found))
    for name, status in zip(names, statuses, strict=True):
        assert f"1 {status}" in next(line for line in shown.splitlines() if line.startswith(f"{name} "))
    assert "REFUSED: refused <T=float32>: x:1: error: no such type" in shown


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_report_exists_after_an_interruption(tmp_path, stop):
    check = check_of(tmp_path, *map(job, "abcd"))

    def progress(name, done, total):
        if done == 2:
            raise stop

    with pytest.raises(stop):
        check.run(progress)
    found = read(tmp_path)
    assert [text["status"] for text in found["texts"]] == ["compiled", "compiled", "not reached", "not reached"]
    assert not found["finished"]
    assert not is_good(found)
    assert check.child is None


def test_the_report_is_updated_while_texts_are_compiled(tmp_path, monkeypatch):
    """The report exists even if the whole process is killed."""
    monkeypatch.setattr(compile_check, "EVERY", 0.0)
    seen = []
    check_of(tmp_path, *map(job, "abc")).run(lambda *_: seen.append(read(tmp_path)))
    assert [found["counts"].get("compiled", 0) for found in seen] == [0, 1, 2]


def test_types_that_the_device_lacks_are_reported_but_no_failure(tmp_path):
    check = check_of(tmp_path, job("a"), job("b", "bfloat16"), job("c", "float16"))
    check.metal = True
    found = check.run(quiet)
    assert [text["status"] for text in found["texts"]] == ["compiled", "type not supported", "compiled"]
    assert found["types_not_supported"].keys() == {"bfloat16"}
    assert is_good(found)
    assert "not supported by this device: bfloat16 (x:1: error: no such type)" in lines(found)


def test_the_threads_that_a_pipeline_allows_are_reported(tmp_path):
    found = check_of(tmp_path, job("few"), job("wide"), job("a")).run(quiet)
    assert [text.get("most_threads") for text in found["texts"]] == [384, 1024, None]
    assert {text["threads"] for text in found["texts"]} == {8}
    shown = [line.partition(" s; ")[2] for line in lines(found)]
    assert shown[:3] == ["groups of up to 384 threads", "groups of up to 1024 threads", ""]


@pytest.mark.parametrize(
    ("message", "most"),
    [
        ("Thread group size (2048) is greater than  the maximum allowed threads per threadgroup (896).", 896),
        ("[metal::malloc] no memory", None),
    ],
)
def test_they_are_read_from_the_error_of_a_group_that_is_too_large(monkeypatch, message, most):
    def launch(threadgroup, **_):
        assert threadgroup == (2048, 1, 1)
        raise ValueError(message)

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert compile_child.most_threads(launch, {"threadgroup": (32, 1, 1), "grid": (32, 1, 1)}) == most


def test_a_child_that_does_not_start_is_one_error_and_a_report(tmp_path):
    check = CompileCheck(
        [job("a")], tmp_path / "report.json", 5.0, [sys.executable, "-c", "raise SystemExit('no mlx')"]
    )
    with pytest.raises(ValueError, match=r"does not start: ended with exit code 1; no mlx$"):
        check.run(quiet)
    assert "no mlx" in read(tmp_path)["not_checked"]
    assert not is_good(read(tmp_path))


def test_a_job_is_json_and_lists_its_types():
    found = [job_of(launch) for launch in launches(["add_norm", "verify_qmm"], 3)]
    assert len(found) == 6
    for each in found:
        assert json.loads(json.dumps(each))["text"] == each["text"]
    assert {name for each in found for name in types_of(each)} == {"float32", "float16", "bfloat16"}


def test_a_sample_covers_every_kernel():
    assert [launch.text.kernel for launch in launches(sample=1)] == [*OPS]


def test_texts_include_the_block_formats():
    """Conversions of GGUF files keep these; only this check compiles them with Apple's compiler in CI."""
    found = {}
    for each in launches():
        given = dict(each.call["template"])
        if given.get("KIND", 0) in (_quantized.BLOCKS, _quantized.SUPERBLOCKS):
            assert given["S"] == mx.uint16
            found.setdefault(each.text.kernel, set()).add((given["BITS"], given["GROUP"], given["KIND"]))
    ops = {"verify_qmm", "verify_glu", "verify_qmm_heads", "verify_head", "moe_glu", "moe_relu2", "moe_down"}
    ops |= {"matrix_qmm", "matrix_glu", "matrix_heads", "matrix_head"}
    three = {(4, 32, _quantized.BLOCKS), (4, 32, _quantized.SUPERBLOCKS), (6, 16, _quantized.SUPERBLOCKS)}
    assert found == dict.fromkeys(ops, three)


@linux_only
def test_a_job_runs_like_its_launch():
    """The emulator runs it instead of the GPU, and also checks shapes and grids."""
    ops = sampled(["moe_route", "norm_rope"], ["add_norm", "moe_route", "gated_norm", "norm_rope"])
    with emulator.emulated() as launched:
        for launch in launches(ops, 1):
            text = json.loads(json.dumps(job_of(launch)))
            assert compile_child.by_mlx(text) == {"refused": None, "most_threads": None}
            broken = {**text, "kernel": {**text["kernel"], "source": "no such thing;"}}
            assert "error" in compile_child.by_mlx(broken)["refused"]
    assert len(launched) == len(ops)


# The command


@sweep  # CI compiles them all in a section of its own
@linux_only
def test_a_sample_is_compiled_through_the_front_end(tmp_path):
    done = command_line.run(
        "doctor", "--compile-only", "--op", "add_norm", "--sample", 2, "--out", tmp_path / "c.json"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("add_norm               2 compiled; ")
    assert "not checked without a Metal GPU: Apple's compiler" in done.stdout
    found = json.loads((tmp_path / "c.json").read_text())
    assert [text["status"] for text in found["texts"]] == ["compiled"] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]


def test_a_report_exists_before_the_texts_are_listed(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_jobs, "launches", interrupted)
    assert command_line.call("doctor", "--compile-only", "--out", tmp_path / "d").returncode == 130
    assert not json.loads((tmp_path / "d.json").read_text())["finished"]


@sweep
@linux_only
def test_every_text_is_compiled_through_the_front_end(tmp_path):
    done = command_line.call("doctor", "--compile-only", "--out", tmp_path / "c")
    assert done.returncode == 0, done.stdout
    assert f"{OPS[-1]} " in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--op", "add_norm"], "--op needs --compile-only or --bits-only"),
        (["--sample", 2], "--sample needs --compile-only"),
        (["--bits-only", "--all-formats"], "--all-formats needs --compile-only"),
        (["--bits-only", "--limit", 3], "--limit needs --compile-only"),
        (["--bits-only", "--compile-only"], "choose one"),
        (["--compile-only", "--model", "demo"], "check no model"),
        (["--compile-only", "--op", "qmm"], "--op: 'qmm': allowed are add_norm, "),
        (["--bits-only", "--op", "moe_glu"], "--op: 'moe_glu': allowed are "),
    ],
)
def test_flags_that_exclude_each_other_are_refused(args, message, tmp_path):
    assert message in command_line.one_line_error(command_line.call("doctor", *args, "--out", tmp_path / "d"), 2)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_there_is_an_error_and_a_report(monkeypatch, tmp_path):
    def missing():
        raise ValueError("the front end check needs clang")

    monkeypatch.setattr(compile_check, "zig", missing)
    if not mx.metal.is_available():
        done = command_line.call("doctor", "--compile-only", "--op", "add_norm", "--out", tmp_path / "d")
        assert "needs clang" in command_line.one_line_error(done)
        assert done.stdout.splitlines() == [
            "not checked: the front end check needs clang",
            f"written: {tmp_path}/d.json",
        ]
        assert "needs clang" in json.loads((tmp_path / "d.json").read_text())["not_checked"]
