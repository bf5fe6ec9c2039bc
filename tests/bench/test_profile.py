"""Check `bench profile`: its phases with their launches and bytes, traces, and the command."""

import json
import time

import command_line
import families
import mlx.core as mx
import pytest
import short_prompts
from mlx.utils import tree_flatten
from sweep import sampled

import mlx_mtp
from mlx_mtp.bench import census, profile_report
from mlx_mtp.bench.page import tables_of
from mlx_mtp.bench.profile import HOST, PHASES, Timer, Workload, decode_in_phases, profile
from mlx_mtp.bench.roofline import phases
from mlx_mtp.bench.roofline.models import of_port
from mlx_mtp.decoding import step as step_module
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.layers.mtp_head import MTPHead

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 0]
SLOW = 0.03  # seconds of a planted delay
ROWS = 4 + 3  # maximum rows of a cycle in any layer; the prompt has more


def work(model, k=3, tokens=9, step=64):
    return Workload(model, PROMPT, tokens, k, step)


@pytest.mark.parametrize("k", sampled([0, 3], [0, 1, 3]))
def test_text_and_cycles_are_those_of_the_loop(tiny_models, k):
    model, watch, stats = tiny_models()[0], Timer(), mlx_mtp.Stats()
    decode_in_phases(work(model, k, 12), watch)
    options = {"adaptive": False, "prompt_lookup": False, "num_draft_tokens": k, "stats": stats}
    assert watch.tokens == [t for t, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=12, **options)]
    assert watch.cycles == stats.cycles


def test_phases_and_the_rest_sum_to_the_wall_time(tiny_models):
    watch = Timer()
    decode_in_phases(work(tiny_models()[0]), watch)
    assert set(watch.phases) == set(PHASES)
    assert all(seconds > 0 for seconds in watch.phases.values())
    assert watch.phases["host"] == pytest.approx(sum(watch.seconds[name] for name in HOST))
    assert sum(watch.phases.values()) + watch.unexplained == pytest.approx(watch.wall)
    assert watch.unexplained > 0


@pytest.mark.timing
def test_little_is_unexplained(tiny_models):
    shares = []
    for _ in range(3):
        watch = Timer()
        decode_in_phases(work(tiny_models()[0]), watch)
        shares.append(watch.unexplained / watch.wall)
    assert min(shares) < 0.03


class Clock:
    """A clock that advances when planted work is computed, and when the host sleeps."""

    def __init__(self, monkeypatch):
        self.now, real = 0.0, mx.eval

        def evaluate(*arrays):
            flat = [a for _, a in tree_flatten(arrays) if isinstance(a, mx.array)]
            self.sleep(SLOW * census.operations(*flat)["ErfInv"])
            real(*arrays)

        monkeypatch.setattr(mx, "eval", evaluate)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds


def on_the_device(monkeypatch, owner, name, when=lambda rows: True):
    """Plant an operation after a function's result."""
    real = getattr(owner, name)

    def slowed(*args, **kwargs):
        found = real(*args, **kwargs)
        planted = when(found.shape[1] if found.ndim > 1 else 0)
        return found + mx.erfinv(0.0 * found).astype(found.dtype) if planted else found

    monkeypatch.setattr(owner, name, slowed)


def asleep(monkeypatch, owner, name):
    real = getattr(owner, name)

    def slowed(*args, **kwargs):
        time.sleep(SLOW)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, slowed)


# Where each delay is planted, and how often per cycle.
PLANTED = {
    "prefill": (lambda patch, model: on_the_device(patch, type(model), "hidden", lambda rows: rows > ROWS), 0),
    "draft": (lambda patch, model: on_the_device(patch, MTPHead, "__call__", lambda rows: rows <= ROWS), 3),
    "verify": (lambda patch, model: on_the_device(patch, type(model), "hidden", lambda rows: rows <= ROWS), 1),
    "accept": (lambda patch, model: on_the_device(patch, step_module, "accept"), 1),
    "build the draft": (lambda patch, model: asleep(patch, Heads, "propose"), 1),
    "build the verify": (lambda patch, model: asleep(patch, step_module, "accept"), 1),
    "commit": (lambda patch, model: asleep(patch, TokenHistory, "extend"), 1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_delay_shows_in_its_phase_only(tiny_models, monkeypatch, name):
    model, watch = tiny_models()[0], Timer()
    plant, times = PLANTED[name]
    Clock(monkeypatch)
    plant(monkeypatch, model)
    decode_in_phases(work(model), watch)
    assert watch.cycles > 2
    times = times * watch.cycles + (name in ("prefill", "commit"))
    expected = {other: times * SLOW * (other == name) for other in watch.seconds}
    assert watch.seconds == pytest.approx(expected)
    assert watch.wall == pytest.approx(times * SLOW)


def test_the_device_is_waited_for(tiny_models, monkeypatch):
    """The same with the real clock and a real load, for the heads."""
    load = mx.random.normal((1 << 18,))
    mx.eval(load)
    real, runs = MTPHead.__call__, []

    def slowed(self, embeddings, hidden, cache):
        found = real(self, embeddings, hidden, cache)
        return found + 0 * mx.sort(load + 0 * found.reshape(-1)[0])[0] if hidden.shape[1] <= ROWS else found

    for head in (real, slowed):
        monkeypatch.setattr(MTPHead, "__call__", head)
        timers = [Timer() for _ in range(2)]
        for timer in timers:
            decode_in_phases(Workload(tiny_models()[0], PROMPT, 4, 3, 64), timer)
        runs.append({name: min(t.seconds[name] for t in timers) for name in timers[0].seconds})
    grown = {name: runs[1][name] - runs[0][name] for name in runs[0]}
    assert grown.pop("draft") > max(0.05, 3 * max(grown.values()))


class Pedant(Timer):
    """Asserts that all evaluated arrays are computed, and that the next phase's graph has no other pending work."""

    def evaluate(self, phase, caches, *arrays):
        super().evaluate(phase, caches, *arrays)
        written = [a for _, a in tree_flatten([arrays, [c.parts for c in caches]]) if isinstance(a, mx.array)]
        assert not census.operations(*written), phase
        self.names = [*getattr(self, "names", []), phase]
        if phase == "draft":
            assert not {"Sort", "ArgSort"} & set(census.operations(*written))


@pytest.mark.parametrize(("family", "k"), [(None, 3), ("qwen3_5", 0)])  # its new states are not read by its own rows
def test_nothing_is_pending_after_a_phase(tiny_models, tmp_path, monkeypatch, family, k):
    model = mlx_mtp.load_model(families.build(family, tmp_path)[0]) if family else tiny_models()[0]
    pending, real = [], step_module.propose

    def propose(frame, run, *args):
        cache = frame.cache
        left = [run.hidden, run.tokens, run.accepted, cache.layers[0].offset, *cache.arrays]
        pending.append(census.operations(*(a for a in left if isinstance(a, mx.array))).total())
        accepted = 0 if run.accepted is None else run.accepted.item()
        assert frame.base + accepted + 1 == mx.array(cache.layers[0].offset).item()
        return real(frame, run, *args)

    monkeypatch.setattr("mlx_mtp.bench.profile.propose", propose)
    watch = Pedant()
    decode_in_phases(work(model, k), watch)
    assert pending == [0] * watch.cycles
    assert watch.names == ["draft", "verify", "accept"][k == 0 :] * watch.cycles


def test_rounds_take_turns_with_the_loop(tiny_models):
    timers, undisturbed = profile(work(tiny_models()[0]), rounds=3)
    assert len(timers) == len(undisturbed) == 3
    assert {tuple(t.tokens) for t in timers} == {tuple(timers[0].tokens)}


@pytest.mark.parametrize("k", [-1, 4])
def test_more_drafts_than_heads_are_refused(tiny_models, k):
    with pytest.raises(ValueError, match=f"num_draft_tokens={k}: allowed is 0 to 3"):
        work(tiny_models()[0], k)


# What is counted


def test_operations_are_those_left_to_compute():
    a = mx.arange(3.0)
    b = mx.exp(a).reshape(1, 3)
    assert census.operations(mx.sin(b) + b) == {"Arange": 1, "Exp": 1, "Sin": 1, "Add": 1}
    mx.eval(b)
    assert census.operations(mx.sin(b) + b, mx.sin(b)) == {"Sin": 2, "Add": 1}


def test_launches_by_phase(tiny_models):
    model = tiny_models()[0]
    found = {k: census.launches(work(model, k)) for k in (0, 1, 3)}
    assert found[0].keys() == {"prefill", "verify", "accept"}
    assert found[1]["draft"] < found[3]["draft"] / 2
    assert found[1]["verify"] == found[3]["verify"]
    layers = held(model, 14)
    hidden = model.hidden(mx.array([[3]]), layers)
    token = mx.argmax(model.logits(hidden), axis=-1).astype(mx.int32)
    by_hand = census.operations(token, *(part for c in layers for part in c.parts))
    assert found[0]["verify"] in (by_hand.total(), by_hand.total() + 1)  # selecting the first token's row


def held(model, rows):
    """Return the caches of a model after a prefill of `rows` rows."""
    cache = mlx_mtp.make_prompt_cache(model, num_draft_tokens=0)
    mx.eval(model.hidden(mx.zeros((1, rows), mx.int32), cache.layers), cache.arrays)
    return cache.layers


@pytest.mark.parametrize("k", [0, 3])
def test_bytes_are_those_of_the_floor_in_the_middle_of_the_text(tiny_models, k):
    model = tiny_models()[0]
    found, ops = census.bytes_read(Workload(model, PROMPT, 8, k, 5)), of_port(model)
    assert found.keys() == {"prefill", "verify", *["draft"] * bool(k)}
    assert found["verify"] == phases.pass_floor(ops, k + 1, len(PROMPT) + 4, "published").total
    assert found.get("draft", 0) == phases.draft_floor(ops, k, len(PROMPT) + 4, "published").total
    assert found["prefill"] == 3 * phases.pass_floor(ops, 5, 0, "published").total


# Output


def test_a_line_per_phase_and_the_rest():
    timers = []
    for spoilt in (0.0, 0.1):
        timer = Timer(tokens=[1, 2, 3], cycles=2, wall=1.0 + spoilt)
        for name, seconds in zip(timer.seconds, (0.5, 0.1, 0.2, 0.0, 0.05, 0.04, 0.01), strict=True):
            timer.seconds[name] = seconds
        timers.append(timer)
    found = profile_report.raw(timers, [0.5, 0.55])
    found |= {"operations": {"draft": 7}, "bytes": {"draft": 1e9, "verify": 1e8}, "bandwidth": {"rate": 1e10}}
    by_name = {line.name: line for line in profile_report.lines(found)}
    assert "accept" not in by_name
    assert by_name["prefill"].ms.median == pytest.approx(500)
    assert by_name["draft"].ms.median == pytest.approx(50)
    assert by_name["draft"].rate == pytest.approx(1e9 / 0.05)
    assert sum(line.share for name, line in by_name.items() if name not in HOST) == pytest.approx(1)
    sentences = " ".join(profile_report.remarks(found))
    assert "2.00x the time" in sentences
    assert "were in caches" in sentences
    assert "caches" not in " ".join(profile_report.remarks({**found, "bandwidth": {"rate": 1e11}}))


def test_bandwidth_is_stated_known_or_measured(monkeypatch):
    assert profile_report.bandwidth_of(100.0) == {"rate": 100e9, "source": "as stated"}
    monkeypatch.setattr(profile_report, "at_hand", lambda: "M3 Ultra")
    assert profile_report.bandwidth_of(None)["rate"] == 819e9
    monkeypatch.setattr(profile_report, "at_hand", lambda: None)
    monkeypatch.setattr(profile_report, "stream_rate", lambda: 3e9)
    assert profile_report.bandwidth_of(None)["rate"] == 3e9
    assert "measured" in profile_report.bandwidth_of(None)["source"]
    assert 1e8 < census.stream_rate(1 << 22, 3) < 1e13


# The command


def test_the_command_writes_its_result(tmp_path, monkeypatch):
    short_prompts.shorten(monkeypatch, tmp_path)
    quick = (
        "--quick",
        "--category",
        "qa_factual",
        "--rounds",
        1,
        "--max-tokens",
        6,
        "--bandwidth",
        10,
        "--out",
        tmp_path / "p.json",
        "--synth-rates",
        "0.5",
    )
    done = command_line.call("bench", "profile", *quick)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "p.json").read_text())
    assert (found["bench"], found["options"]["k"], found["tokens"]) == ("profile", 3, 6)
    for i, wall in enumerate(found["wall"]):
        assert sum(times[i] for times in found["seconds"].values()) + found["unexplained"][i] == pytest.approx(wall)
    label = "demo, SYNTHETIC: acceptance drawn at 0.5, 3 drafts per cycle"
    assert label in " ".join(done.stdout.split())
    assert [t.title for t in tables_of(found)] == [label]
    for words in (
        "prefill",
        "build the draft",
        "in no phase",
        "Overhead:",
        "10.0 GB/s, as stated",
        "inconclusive",
    ):
        assert words in done.stdout or words == "inconclusive"
