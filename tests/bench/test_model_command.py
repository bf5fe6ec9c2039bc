"""Run `mlx-mtp bench model`: this machine's chip, measured times next to floors, mistakes."""

import json
import statistics

import pytest
from command_line import call
from families import FAMILIES
from results import decode_result, profile_result, verify_result

from mlx_mtp.bench import result
from mlx_mtp.bench.roofline import assemble, chips, models, phases
from mlx_mtp.demo import demo_path

M3_ULTRA = chips.fitted_chips()["M3 Ultra"]

DEVICES = [
    *(("Apple M3 Ultra", None, "M3 Ultra"), ("Apple M1", None, "M1"), ("Apple M3 Max", 30, "M3 Max 30c")),
    *(("Apple M3 Max", 40, "M3 Max 40c"), ("Apple M3 Max", None, "M3 Max 40c"), ("Apple M4 Max", 32, "M4 Max 32c")),
    *(
        ("Apple M5 Pro", 18, "M5 Pro"),
        ("Apple M6", None, None),
        ("Apple M5 Ultra", None, None),
        ("AMD EPYC", None, None),
    ),
]


@pytest.mark.parametrize("name", ["M3 Ultra", "apple m3 ultra", "m1", "M3 Max", "M3 Max 30c", "M5 Pro"])
def test_a_chip_is_named_whole(name):
    assert assemble.find_chip(name).name.lower().startswith(name.lower().removeprefix("apple "))
    for mistyped in (f"{name}x", f"x{name}", f"{name} Mini"):
        with pytest.raises(ValueError, match="unknown; allowed are M1"):
            assemble.find_chip(mistyped)


@pytest.mark.parametrize(("device", "cores", "name"), DEVICES)
def test_the_chip_of_this_machine(device, cores, name):
    assert chips.find(device, cores) == name


def test_measured_times_are_those_of_the_results():
    verify, decode, profile = (made() for made in (verify_result, decode_result, profile_result))
    times = {(t["phase"], t["rows"], t["side"]): t["seconds"] for t in assemble.nearest(verify, 128)}
    whole = next(c for c in verify["curves"] if (c["name"], c["context"]) == ("whole", 128))
    for side, seconds in whole["seconds"].items():
        for m, values in seconds.items():
            phase = "plain step" if m == "1" else "verify"
            assert times.pop((phase, int(m), f"{side} pass")) == statistics.median(values)
    assert not times
    found = {(t["phase"], t["rows"], t["side"]): t["seconds"] for t in assemble.times(decode)}
    assert len({t["context"] for t in assemble.times(decode)}) == 1
    entries = [e for e in decode["entries"] if e["contender"] == "k=2"]
    speeds = [sum(e["tokens"][i] - 1 for e in entries) / sum(e["seconds"][i] for e in entries) for i in range(3)]
    cycles, kept = (
        sum(map(sum, x)) for x in ([e["cycles"] for e in entries], [[sum(a) for a in e["accepted"]] for e in entries])
    )
    assert found["cycle", 3, "loop"] == pytest.approx((1 + kept / cycles) / statistics.median(speeds))
    assert found.keys() >= {("plain step", 1, "loop"), ("plain step", 1, "mlx-lm's loop"), ("cycle", 2, "loop")}
    parts = {(t["phase"], t["rows"]): t["seconds"] for t in assemble.times(profile)}
    assert parts["draft", 4] == statistics.median(profile["seconds"]["draft"]) / profile["cycles"]
    assert parts["cycle", 4] > parts["draft", 4] + parts["verify", 4]


def test_a_result_of_another_model_or_context_is_refused():
    demo = assemble.find_model("demo", on_chip=False)
    with pytest.raises(ValueError, match="bench verify was measured at 128, 4096 tokens"):
        assemble.bench_model(demo, None, 2000, results=[verify_result()])
    step = assemble.find_model("step-3.5-flash", on_chip=True)
    with pytest.raises(ValueError, match=r"Step-3\.5-Flash has 111 GB: give the measured model with --model"):
        assemble.bench_model(step, M3_ULTRA, 128, results=[verify_result()])
    with pytest.raises(ValueError, match="a result of bench model; allowed are decode, verify, profile"):
        assemble.times({"bench": "model"})


def test_the_command_with_measured_results(tmp_path):
    files = []
    for made in (verify_result(), decode_result(), profile_result()):
        files.append(tmp_path / f"{made['bench']}.json")
        result.write(made, files[-1])
    shown = call(
        "bench", "model", *(x for file in files for x in ("--measured", file)), "--out", tmp_path / "out.json"
    )
    assert shown.returncode == 0, shown.stderr
    found = result.read(tmp_path / "out.json", "model")
    assert found["model"]["name"] == "demo"
    assert found["options"]["context"] == 128
    assert len(found["measured"]) > 10
    assert "GB/s)" in shown.stdout
    result.write(verify_result(target_bytes=5_600_000), files[0])  # in 16 bits, as on a Mac
    on_mac = call("bench", "model", "--measured", files[0], "--chip", "m3 ultra", "--out", tmp_path / "out.json")
    assert "stock pass" in on_mac.stdout
    assert "GB/s)" not in on_mac.stdout
    found = result.read(tmp_path / "out.json", "model")
    nbytes = next(x["bytes"]["total"] for x in found["floors"] if (x["rows"], x["overlap"]) == (1, "published"))
    seconds = next(x["seconds"] for x in found["measured"] if (x["rows"], x["side"]) == (1, "stock pass"))
    assert f"{seconds * 1e3:.2f} ({seconds * M3_ULTRA.bandwidth / nbytes:.2f}x)" in on_mac.stdout


def test_json_is_printed_instead_of_tables_on_request(tmp_path):
    shown = call("bench", "model", "--quick", "--json", "--out", tmp_path / "out.json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert "{" not in call("bench", "model", "--quick").stdout


def test_a_result_is_printed_if_its_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    shown = call("bench", "model", "--quick", "--out", tmp_path / "file" / "out.json")
    assert shown.returncode == 1
    assert json.loads(shown.stdout.splitlines()[-1])["bench"] == "model"


def test_the_gap_is_the_time_over_the_floor(tmp_path):
    out = tmp_path / "out.json"
    shown = call(
        "bench", "model", "--chip", "M3 Ultra", "--model", "GLM-4.5", "--context", 1000, "--quick", "--out", out
    )
    found = result.read(out)
    assert {line["rows"] for line in found["floors"]} == {1, 2, 4}
    verify = next(
        p
        for p in found["predicted"]
        if (p["phase"], p["rows"], p["side"], p["overlap"]) == ("verify", 4, "ours", "published")
    )
    plain = next(
        p for p in found["predicted"] if (p["phase"], p["side"], p["overlap"]) == ("plain step", "ours", "published")
    )
    nbytes = phases.pass_floor(models.MODELS["GLM-4.5"], 4, 1000, "published").total
    seconds = nbytes / (819e9 * found["chip"]["usable"])
    ratios = verify["seconds"] / seconds, verify["seconds"] / plain["seconds"]
    assert "{:.2f} ({:.2f}x; {:.2f})".format(verify["seconds"] * 1e3, *ratios) in shown.stdout


def test_a_config_and_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_5_moe"].config))
    shown = call("bench", "model", "--config", tmp_path / "config.json", "--quick")
    assert shown.returncode == 0, shown.stderr
    assert tmp_path.name in shown.stdout
    by_path = call("bench", "model", "--model", demo_path(), "--quick")
    assert by_path.returncode == 0, by_path.stderr
    assert "no chip that is known" in by_path.stdout


MISTAKES = {
    "chip": (("--chip", "M9"), "chip=M9: unknown; allowed are M1, M1 Pro"),
    "model": (("--model", "nonesuch"), "model=nonesuch: neither a directory nor a known model; allowed are Step"),
    "both": (("--model", "GLM-4.5", "--config", __file__), "not together with a model"),
    "config": (("--config", "nonesuch.json"), "'nonesuch.json' does not exist"),
    "measured": (("--measured", "nonesuch.json"), "'nonesuch.json' does not exist"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case):
    args, message = MISTAKES[case]
    shown = call("bench", "model", *args)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert message in shown.stderr
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--model", "--config", "--measured"])
def test_an_empty_directory_or_file_is_a_failure(option, tmp_path):
    (tmp_path / "x").write_text("{")
    shown = call("bench", "model", option, tmp_path if option == "--model" else tmp_path / "x")
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert shown.stderr.startswith(f"error: {tmp_path}")
