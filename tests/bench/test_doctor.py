"""Check `mlx-mtp doctor`: faults and failures are reported, affect nothing else, and files are complete or absent."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import command_line
import mlx.core as mx
import pytest
from doctor_results import COUNTED, TIMED, found_of
from trial_cases import WEIGHTS, fails, off_by_one_bit, stock, trial

from mlx_mtp.bench import doctor, emulated_check
from mlx_mtp.bench.compile_jobs import OPS
from mlx_mtp.bench.doctor_page import page, table, verdict
from mlx_mtp.bench.doctor_summary import REGISTERS, by_kernel
from mlx_mtp.emulator import compile as compiling
from mlx_mtp.layers.runtime import Runtime


def test_a_good_verdict_lists_what_was_not_checked():
    good, words = verdict(found_of(COUNTED))
    assert good
    assert words.startswith("1 kernels right, 0 wrong; not checked without a Metal GPU: kernels' speed")
    shown = page(found_of(COUNTED))
    heat = "| heat before | not known: not reported by the system "
    assert all(part in shown for part in ("**All well:**", "**Emulated** on the CPU", heat))
    for cells in ("| k=2 | 315 | 240 | 192 | 90%/70% |", "| tok/cycle |", "| 2 | 1.40 |", "| draft | 4.00 | 16.0% |"):
        assert cells in re.sub(" +", " ", shown)
    assert "Overhead: 1.11x the time of the loop" in shown


def test_on_a_gpu_a_line_has_the_ratio_of_each_number_of_rows():
    shown = page(found_of(TIMED, {**TIMED, "rows": 8, "ratio": 0.5, "compile_seconds": 0.4}, metal=True))
    (line,) = [line for line in shown.splitlines() if line.startswith("| add_norm")]
    assert "".join(line.split()) == "|add_norm|512|right||1.25||||||0.50|0.7|"
    assert "Emulated" not in shown
    assert "not checked" not in shown


def test_a_spelling_of_multiply_adds_is_named_once():
    spelled = {**TIMED, "spelling": "FUSED"}
    wrong = {**spelled, "op": "verify_qmm", "wrong": "row 1 differs from one row alone"}
    shown = page(found_of({**TIMED, "spelling": "AS_COMPILED"}, wrong, metal=True))
    assert "ultiply-adds" not in shown
    shown = page(found_of(spelled, {**spelled, "rows": 3}, wrong, metal=True))
    (line,) = [line for line in shown.splitlines() if "ultiply-adds" in line]
    assert line == "Multiply-adds spelled out, as the compiler's differ from those of MLX's library: add_norm fused."


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (found_of(COUNTED, {**COUNTED, "shape": "8", "wrong": "row 1 differs"}), "1 kernels right, 1 wrong"),
        (found_of(COUNTED, {"op": "norm_rope", "failed": "CompileError: no"}), "1 kernels right, 0 wrong, 1 failed"),
        (
            found_of(COUNTED, verify={"failed": "ValueError: v"}, host={"failed": "h"}),
            "failed: a verify of M rows, a cycle",
        ),
        (found_of(TIMED, {**TIMED, "rows": 3, "wrong": "row 2 errs"}, metal=True), "0 kernels right, 1 wrong"),
        (found_of({"of": "a", "op": "b", "failed": "no"}, metal=True), "0 kernels right, 0 wrong, 1 failed"),
        (found_of(kernels={"failed": "OSError: k"}), "failed: kernels"),
    ],
)
def test_faults_and_failures_are_in_the_verdict_and_the_page(found, words):
    good, line = verdict(found)
    assert not good
    assert words in line
    shown = page(found)
    assert "**Something is wrong:**" in shown
    reasons = [k[why] for k in found["kernels"].get("found", ()) for why in ("wrong", "failed") if k.get(why)]
    reasons += [part["failed"] for part in found.values() if isinstance(part, dict) and "failed" in part]
    assert reasons
    assert all(reason in shown for reason in reasons)


def test_kernels_refused_while_decoding_are_shown():
    refused = ["add_norm 512", [5, 6], "fails with RuntimeError: add_norm.metal:3:1: error: y"]
    found = found_of(COUNTED, refused=[refused])
    good, words = verdict(found)
    assert not good
    assert "1 kernels were refused and are off" in words
    assert "OFF: add_norm 512, M=5, 6: fails with RuntimeError: add_norm.metal:3:1: error: y" in page(found)


def of_kernel(name, found):
    """Return a kernel's line of the summary, and its cells on the page."""
    (line,) = [k for k in by_kernel(found) if k["kernel"] == name]
    section = page(found).partition("## Every kernel")[2].partition("## ")[0]
    (row,) = [row for row in section.splitlines() if row.startswith(f"| `{name}` ")]
    for reason in line["not_checked"]:
        assert f": {reason}" in section
    return line, [cell.strip() for cell in row.split("|")[1:-1]]


def test_every_kernel_is_summarised():
    assert [k["kernel"] for k in by_kernel(found_of(COUNTED))] == [*OPS]
    assert all(k["not_checked"] for k in by_kernel(found_of(TIMED, metal=True)))


def test_the_summary_of_a_kernel_on_a_gpu():
    """The summary states compiled, right, ratios and spelling, in JSON and as cells of the page."""
    lines = [{**TIMED, "kernels": ["add_norm", "gated_norm"], "spelling": "FUSED", "ratio": r} for r in (1.25, 0.5)]
    for name in ("add_norm", "gated_norm"):
        line, cells = of_kernel(name, found_of(*lines, metal=True))
        assert (line["compiled"], line["right"], line["ratio"]) == (True, True, [0.5, 1.25])
        assert line["alternative"] == {"multiply_adds": "fused"}
        assert line["not_checked"] == [REGISTERS]
        assert cells == [f"`{name}`", "add_norm", "yes", "yes", "0.50-1.25", "fused", "not reported by MLX"]


def test_the_summary_states_which_rows_are_split_and_the_threads_that_a_pipeline_allows():
    line = {**TIMED, "op": "verify_moe", "kernels": ["moe_glu", "moe_route"], "splits": ["moe_glu"]}
    lines = [
        {**line, "rows": rows, "split": split, "most_threads": {"moe_glu": threads}}
        for rows, split, threads in ((4, False, 1024), (8, True, 384), (6, True, 384))
    ]
    found = found_of(*lines, metal=True)
    (of, cells), (route, _) = of_kernel("moe_glu", found), of_kernel("moe_route", found)
    assert of["alternative"] == {"rows_split": [6, 8], "rows_together": [4]}
    assert of["registers"] == {"most_threads_per_group": [384, 1024]}
    assert cells[-2:] == ["rows split: M=6, 8; rows together: M=4", "for 384-1024 threads"]
    assert (route["alternative"], route["registers"]) == (None, "not reported by MLX")
    assert (REGISTERS in of["not_checked"], REGISTERS in route["not_checked"]) == (False, True)


REFUSED = fails(ValueError("Thread group size (512) is greater"))


@pytest.mark.parametrize(
    ("whole", "split", "ratios", "wrong", "chosen", "refused"),
    [
        (stock, stock, (1.5, 1.2), None, False, []),
        (stock, stock, (1.2, 1.5), None, True, []),
        (stock, REFUSED, (1.2, None), None, False, ["rows split"]),
        (REFUSED, stock, (None, 1.2), None, True, ["rows together"]),
        (stock, off_by_one_bit(), (None, None), "rows split: row 1 of 3 differs", None, []),
        (off_by_one_bit(), stock, (None, None), "row 1 of 3 differs", None, []),
        (REFUSED, REFUSED, (None, None), "fails with ValueError", None, []),
    ],
)
def test_both_alternatives_are_checked_and_the_faster_one_is_named(
    monkeypatch, whole, split, ratios, wrong, chosen, refused
):
    both = replace(trial(whole), split=[split(w) for w in WEIGHTS])
    monkeypatch.setattr(doctor, "time_pair", lambda t: ratios[0 if t.split else 1])
    found = doctor.tried(both)
    assert found["wrong"] is None if wrong is None else found["wrong"].startswith(wrong)
    assert (found.get("split"), [*found["refused"]]) == (chosen, refused)
    assert found["ratio"] == max(filter(None, ratios), default=None)
    shown = page(found_of({**TIMED, "splits": [], **found}, metal=True))
    assert ("REFUSED: add_norm 512, M=2, " in shown) == bool(refused)


@pytest.mark.parametrize(
    ("kernel", "found", "compiled", "right", "why"),
    [
        (
            "add_norm",
            found_of({**TIMED, "wrong": "row 1 differs", "ratio": None}, metal=True),
            True,
            False,
            "is wrong",
        ),
        (
            "add_norm",
            found_of({**TIMED, "wrong": "fails with E: no", "ratio": None}, metal=True),
            False,
            False,
            "failed",
        ),
        ("add_norm", found_of({"of": "a", "op": "add_norm", "failed": "no"}, metal=True), False, False, "failed"),
        (
            "add_norm",
            found_of({**TIMED, "ratio": None}, metal=True, bits_only=True, op=[]),
            True,
            True,
            "--bits-only",
        ),
        ("add_norm", found_of(COUNTED), None, True, "no Metal GPU"),
        ("choose_rows", found_of(TIMED, metal=True), None, None, "no case launches it"),
        ("choose_rows", found_of(TIMED, metal=True, bits_only=True, op=["add_norm"]), None, None, "no op of --op"),
        ("choose_rows", found_of(kernels={"found": [], "not_checked": "no clang"}), None, None, "no clang"),
    ],
)
def test_unchecked_parts_of_a_kernel_are_listed_with_the_reason(kernel, found, compiled, right, why):
    line, cells = of_kernel(kernel, found)
    assert (line["compiled"], line["right"], line["ratio"]) == (compiled, right, None)
    assert any(why in reason for reason in line["not_checked"])
    assert cells[2:4] == [
        {True: "yes", None: ""}.get(compiled, "**no**"),
        {True: "yes", None: ""}.get(right, "**WRONG**"),
    ]


def test_cells_line_up_and_bars_in_them_are_escaped():
    lines = list(table(("a", "b"), [("x|y", 1), ("z", 100)], "<>"))
    assert lines == ["| a    |   b |", "| ---- | --: |", "| x\\|y |   1 |", "| z    | 100 |"]


@pytest.fixture
def no_clang(monkeypatch):
    """A Linux machine without clang, in the environment that README.md installs."""
    monkeypatch.delenv("MLX_MTP_CLANG", raising=False)
    monkeypatch.setattr(compiling, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    for found in (compiling.find_clang, compiling.runtime_library):
        found.cache_clear()
    yield
    for found in (compiling.find_clang, compiling.runtime_library):
        found.cache_clear()


def test_without_a_clang_kernels_are_not_checked_and_nothing_is_wrong(no_clang, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "on_metal", lambda: False)
    for name in ("facts", "verify", "decode", "host"):
        monkeypatch.setattr(doctor.ExaminedModel, name, lambda self, name=name: found_of()[name])
    shown = command_line.call("doctor", "--out", tmp_path / "d")
    words = "kernels not checked: no clang 16 or newer: pip install -e '.[emulate]'"
    assert shown.returncode == 0
    assert shown.stdout.startswith(words)
    assert "\nNext: mlx-mtp verify-lossless  checks" in shown.stdout
    written = (tmp_path / "d.md").read_text()
    assert all(part in written for part in ("**No fault found:** " + words, "\nK" + words[1:]))
    for false in ("wrong:", "failed", "0 kernels right", "All well"):
        assert false not in shown.stdout + written
    assert json.loads((tmp_path / "d.json").read_text())["kernels"]["not_checked"].startswith(words)


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "kernels", "--emulate", "--op", "verify_head"),
        ("bench", "kernels", "--emulate"),
        ("bench", "kernels", "--emulate", "--op", "add_norm", "--rows", 2),
    ],
)
def test_without_a_clang_commands_that_emulate_name_the_extra(no_clang, command):
    line = command_line.one_line_error(command_line.call(*command))
    assert line.startswith("error: no clang 16 or newer: pip install -e '.[emulate]'")
    assert line.endswith(", or set MLX_MTP_CLANG to one")


def test_a_ziglang_without_its_program_is_no_clang(no_clang, monkeypatch, tmp_path):
    for origin in (None, str(tmp_path / "__init__.py")):
        monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name, o=origin: SimpleNamespace(origin=o))
        with pytest.raises(ValueError, match=r"^no clang"):
            compiling.find_clang()


def test_a_failing_part_does_not_affect_the_others(monkeypatch):
    monkeypatch.setattr(doctor, "on_metal", lambda: False)
    monkeypatch.setattr(doctor, "find_clang", lambda: None)
    monkeypatch.setattr(doctor, "SMALL", ["a", "b"])
    monkeypatch.setattr(emulated_check, "of_op", lambda op: {"op": "b"} if op == "b" else 1 / 0)
    for name in ("facts", "verify", "host"):
        monkeypatch.setattr(doctor.ExaminedModel, name, lambda self, name=name: {"did": name})
    monkeypatch.setattr(doctor.ExaminedModel, "decode", lambda self: [][1])
    reported = []
    found = doctor.examine(SimpleNamespace(model=SimpleNamespace(runtime=Runtime())), reported.append)
    assert found["decode"] == {"failed": "IndexError: list index out of range"}
    assert [found[name]["did"] for name in ("facts", "verify", "host")] == ["facts", "verify", "host"]
    assert found["kernels"]["found"][0] == {"op": "a", "failed": "ZeroDivisionError: division by zero"}
    assert found["kernels"]["found"][1]["op"] == "b"
    assert json.loads(json.dumps(found)) == found
    assert "a, emulated" in reported


def test_on_a_gpu_wrong_kernels_are_not_timed_and_failures_are_isolated(monkeypatch):
    def broken_stock(_):
        raise RuntimeError("stock fails")

    made = [trial(), trial(off_by_one_bit(), rows=4), trial(fails(OSError("no buffer")), rows=5)]
    object.__setattr__(made[0], "pairs", [(ours, broken_stock) for ours, _ in made[0].pairs])
    monkeypatch.setattr(doctor, "trials", lambda sites, dtype: made)
    monkeypatch.setattr(doctor, "time_pair", lambda trial: 1 / 0)
    first, wrong, failing = doctor.on_gpu("case", "double", lambda: [], mx.float32)
    assert first["failed"] == "RuntimeError: stock fails"
    assert "differs from one row alone" in wrong["wrong"]
    assert "no buffer" in failing["wrong"]
    assert wrong["ratio"] is failing["ratio"] is None


@pytest.mark.parametrize("missing", [(), ("bfloat16",)])
def test_bits_on_a_gpu_are_checked_in_every_supported_type(monkeypatch, missing):
    """Unsupported types are reported but are no fault."""
    monkeypatch.setattr(doctor, "on_metal", lambda: True)
    monkeypatch.setattr(doctor, "lacking", lambda: dict.fromkeys(missing, "error: no such type"))
    monkeypatch.setattr(doctor, "launched", lambda trial: {"kernels": ["add_norm"]})
    monkeypatch.setattr(
        doctor,
        "tried",
        lambda trial, timed: (
            {"wrong": None, "dtype": str(trial.dtype), "ratio": timed or None}
            | {"weight": str(trial.pairs[0][0].__self__.norm.weight.dtype), "compile_seconds": 0.0}
        ),
    )
    found = doctor.examine_bits(["add_norm"], lambda _: None)
    lines = found["kernels"]["found"]
    expected = [t for t in ("bfloat16", "float16", "float32") if t not in missing]
    assert [*dict.fromkeys(k["dtype"].rpartition(".")[2] for k in lines)] == expected
    assert all(k["weight"] == k["dtype"] and k["ratio"] is None for k in lines)
    good, words = verdict(found)
    assert good
    assert ("not supported by this GPU: bfloat16" in words) == bool(missing)
    assert "not checked: speed" in words
    assert "## Every kernel" in page(found)
    assert found["matrix_unit"]["not_read"] == ("the GPU does not support bfloat16" if missing else "no Metal GPU")


def test_rows_of_the_model_are_checked(tiny_models, own_cache, monkeypatch):
    model, _ = tiny_models(0)
    monkeypatch.setattr(model, "runtime", Runtime(report=model.report))
    found = doctor.ExaminedModel(SimpleNamespace(model=model)).rows()
    assert found["words"].startswith(
        "up to 16 of a pass equal the same rows alone, within rounding, at context 1; not"
    )
    assert "not covered: context 1,024, 16,384 (not requested)" in page({**found_of(COUNTED), "rows": found})


# The command


@pytest.fixture
def examined(monkeypatch):
    """Make the command find these results."""
    found = found_of(COUNTED)
    monkeypatch.setattr(doctor, "examine", lambda subject, progress: found)
    return found


def test_both_files_are_written_and_the_verdict_is_the_exit_code(examined, tmp_path):
    done = command_line.call("doctor", "--out", tmp_path / "mac.md")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 kernels right, 0 wrong")
    assert "\nMatrix unit: not read (no Metal GPU)\n" in done.stdout
    assert json.loads((tmp_path / "mac.json").read_text()) == examined
    assert (tmp_path / "mac.md").read_text() == page(examined)
    examined["kernels"]["found"].append({**COUNTED, "shape": "8", "wrong": "row 1 differs"})
    assert command_line.call("doctor", "--out", tmp_path / "mac").returncode == 1
    assert "WRONG: add_norm 8, M=4: row 1 differs" in (tmp_path / "mac.md").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mac.json", "mac.md"]


def test_ctrl_c_leaves_no_file(monkeypatch, tmp_path):
    def interrupted(subject, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert command_line.call("doctor", "--out", tmp_path / "mac").returncode == 130
    assert not list(tmp_path.iterdir())


def test_invalid_arguments_are_refused_before_anything_runs(examined, tmp_path):
    done = command_line.call("doctor", "--out", tmp_path / "no" / "mac")
    assert "no directory" in command_line.one_line_error(done, 2)
    missing = tmp_path / "none"
    assert str(missing) in command_line.one_line_error(command_line.call("doctor", "--model", missing))
