"""Check `bench decode`: it measures correctly, shows slow and wrong loops, and compares results."""

import json
from dataclasses import dataclass, field

import pytest
import short_prompts
from command_line import call
from results import made
from sweep import sampled

import mlx_mtp
from mlx_mtp.bench import decode, parallel, subject, timing
from mlx_mtp.bench.decode import (
    PLAIN,
    LoopSettings,
    MlxLm,
    Ours,
    PrefilledLoop,
    as_result,
    broken,
    measure,
    open_session,
    timed,
    twin,
)
from mlx_mtp.bench.decode_tables import overall, rows
from mlx_mtp.bench.subject import BenchPrompt, make_prompts, open_subject
from mlx_mtp.demo import demo_path

WHOLE = (0, None, None)
QUICK = ("bench", "decode", "--categories", "translation", "--prompts", 1, "--rounds", 1, "-m", 4)


@pytest.fixture(scope="module")
def demo():
    return open_subject()


class Clock:
    """A clock that a test advances."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Slowed(Ours):
    """Our loop with 10 ms and a constant per cycle."""

    clock: Clock = field(default_factory=Clock)
    rest: float = 0.0

    def tokens(self, prompt, cache, max_tokens, settings):
        cycles = 0
        for token in super().tokens(prompt, cache, max_tokens, settings):
            assert self.stats
            self.clock.now += (self.stats.cycles - cycles) * (0.01 + self.rest)
            cycles = self.stats.cycles
            yield token


@dataclass
class Wrong(Ours):
    """Our loop with a wrong fourth token."""

    def tokens(self, prompt, cache, max_tokens, settings):
        for i, token in enumerate(super().tokens(prompt, cache, max_tokens, settings)):
            yield token + (i == 3)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(decode, "WARMUPS", 1)
    short_prompts.shorten(monkeypatch, tmp_path_factory.mktemp("prompts"))


def prompt_of(opened, kind="translation"):
    return make_prompts(opened.tokenizer, opened.model.vocab_size, each=1, only=[kind])


def session_of(opened, others, rounds, **options):
    session = open_session(opened, [2], rounds, 0.0)
    session.loops = [*session.loops[:2], *others]
    options = {"max_tokens": 5, "prefill_step_size": 256, "stop_tokens": opened.stop_tokens, **options}
    measure(session, prompt_of(opened), LoopSettings(**options), lambda *_: None)
    return session


def test_all_loops_generate_the_plain_text(demo):
    (prompt,) = prompt_of(demo, "stepwise_math")
    options = {"max_tokens": 6, "stop_tokens": demo.stop_tokens}
    text = [t for t, *_ in mlx_mtp.generate_step(prompt.tokens, demo.model, num_draft_tokens=0, **options)]
    assert len(text) == 6
    assert len(prompt.tokens) > 16 + 1  # two chunks
    fixed = {"adaptive": False}
    others = [MlxLm(twin(demo.model)), Ours(demo.model, "k", 3, fixed), Ours(demo.model, "adaptive", None)]
    for loop in [*others, Ours(demo.model, PLAIN, 0)]:
        reader = PrefilledLoop(loop, prompt.tokens, LoopSettings(**options, prefill_step_size=16)).read()
        runs = [reader.run() for _ in range(2)]  # both from the same cache, which neither changes
        assert [run.tokens for run in runs] == [text] * 2
        counted = [run.stats.generation_tokens for run in runs if run.stats]
        assert counted == ([6] * 2 if loop.stats else [])


def test_the_clock_starts_with_the_first_token(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(decode, "time", clock)

    def steps():
        for token, seconds in ((1, 3.0), (2, 0.5)):
            clock.now += seconds
            yield token

    assert timed(steps()) == ([1, 2], 0.5)


def test_each_turn_starts_with_a_rest(demo, monkeypatch):
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    session = open_session(demo, [2], 2, 1.5)
    session.loops = session.loops[1:2]
    measure(session, prompt_of(demo), LoopSettings(max_tokens=2, prefill_step_size=256), lambda *_: None)
    assert rests == [1.5] * 3  # a warm-up and two rounds


@pytest.mark.parametrize("slow", sampled(["k=2"], ["plain", "k=2"]))
def test_a_slowed_loop_is_measured_as_slower(demo, monkeypatch, slow):
    clock, fixed = Clock(), {"adaptive": False, "prompt_lookup": False}
    monkeypatch.setattr(decode, "time", clock)
    rest = {slow: 0.03}
    session = open_session(demo, [2], 2, 0.0)
    session.loops = [
        Slowed(demo.model, name, k, fixed, clock=clock, rest=rest.get(name, 0.0))
        for name, k in ((PLAIN, 0), ("k=2", 2))
    ]
    settings = LoopSettings(max_tokens=9, prefill_step_size=256)
    measure(session, prompt_of(demo), settings, lambda *_: None)
    plain, drafting = rows(as_result(session, {}), WHOLE)
    per_cycle = {name: 0.01 + rest.get(name, 0.0) for name in (PLAIN, "k=2")}
    (cycles,) = {count for entry in session.entries for count in entry["cycles"] if entry["contender"] == "k=2"}
    assert cycles < 8
    assert plain.speed.median == pytest.approx(1 / per_cycle[PLAIN])
    assert drafting.speed.median == pytest.approx(8 / cycles / per_cycle["k=2"])
    assert drafting.vs_plain.median == pytest.approx(8 / cycles * per_cycle[PLAIN] / per_cycle["k=2"])
    assert drafting.vs_plain.conclusive
    assert not session.differences


def test_a_different_text_is_reported_at_its_first_difference(demo):
    session = session_of(demo, [Wrong(demo.model, "wrong", 2)], 1)
    (difference,) = session.differences
    assert (difference["contender"], difference["position"]) == ("wrong", 3)
    assert difference["found"] == [difference["expected"][0] + 1]
    result = as_result(session, {})
    assert broken(result) == [difference]
    result["model"] = {**result["model"], "dtype": "bfloat16"}
    assert broken(result) == []  # perhaps a near-tie
    table = [[str(cell) for cell in column.cells] for column in overall(result, WHOLE).columns]
    remarks = dict(zip(table[0], table[-1], strict=True))
    assert "text differs" in remarks["wrong"]
    assert "text differs" not in remarks["mlx-lm"] + remarks[PLAIN]


def test_sampled_texts_are_compared_only_among_our_loops(demo):
    fixed = {"adaptive": False}
    others = [Ours(demo.model, "k=2", 2, fixed), Wrong(demo.model, "wrong", 2)]
    session = session_of(demo, others, 1, temp=1.5, seed=4, stop_tokens=())
    assert [d["contender"] for d in session.differences] == ["wrong"]
    by_loop = {entry["contender"]: entry for entry in session.entries}
    assert by_loop["k=2"]["text"] == by_loop[PLAIN]["text"] != by_loop["mlx-lm"]["text"]


def test_peaks_belong_to_one_loop(demo):
    session = session_of(demo, [Ours(demo.model, "k=2", 2, {"adaptive": False}, 10**9)], 1)
    by_loop = {e["contender"]: max(*e["peak_bytes"], e["read_peak_bytes"]) for e in session.entries}
    target = demo.facts["target_bytes"]
    assert target < by_loop["mlx-lm"] < 2 * target
    assert target < by_loop[PLAIN] < 2 * target
    assert by_loop["k=2"] > 10**9


def test_prompts_are_nine_kinds_padded_to_a_length(demo, monkeypatch):
    monkeypatch.setattr(subject, "FILE", short_prompts.WHOLE)
    whole = make_prompts(demo.tokenizer, 2048, each=2)
    kinds = dict.fromkeys(p.category for p in whole)
    assert len(kinds) == 9
    assert len(whole) == 18
    assert len({tuple(p.tokens) for p in whole}) == 18
    for context in (600, 1500):
        for p, short in zip(make_prompts(demo.tokenizer, 2048, each=1, context=context), whole[::2], strict=True):
            assert 0.97 * context <= len(p.tokens) <= context
            assert p.tokens[-10:] == short.tokens[-10:]
    with pytest.raises(ValueError, match=r"contexts=20: too short for a prompt"):
        make_prompts(demo.tokenizer, 2048, each=1, context=20)
    with pytest.raises(ValueError, match=r"categories=nope: allowed are code_python, "):
        make_prompts(demo.tokenizer, 2048, each=1, only=["nope"])
    random = make_prompts(None, 50, each=2, context=30)
    assert [len(p.tokens) for p in random] == [30, 30]
    assert max(map(max, (p.tokens for p in random))) < 50


def test_loops_that_cannot_run_are_left_out_and_named(demo):
    session = session_of(demo, [], 1, kv_bits=8, kv_group_size=32)
    assert list(session.left_out) == ["mlx-lm with kv_bits=8"]  # its windows cannot be quantized
    assert {e["contender"] for e in session.entries} == {PLAIN}
    with pytest.raises(ValueError, match=r"drafts=4: allowed with this model is 1 to 3"):
        open_session(demo, [4], 1, 0.0)


def test_a_drafter_that_replaces_the_heads_is_timed():
    """A small model, here the target itself, whose drafts are therefore all accepted."""
    small = open_subject(draft_model=str(demo_path()))
    session = open_session(small, [2], 1, 0.0)
    assert [loop.name for loop in session.loops] == ["mlx-lm", PLAIN, "k=2", "adaptive"]
    assert len([loop.name for loop in open_session(small, [], 1, 0.0).loops]) == 3 + decode.USUAL_DRAFTS
    assert parallel.DRAFTED in parallel.contenders(small, 64)[0]
    measure(session, [BenchPrompt("text", [1, 2, 3])], LoopSettings(max_tokens=4), lambda *_: None)
    assert session.entries[2]["drafted"] == session.entries[2]["accepted"] != [[]]
    assert not session.differences


def test_the_command_writes_the_result(tmp_path):
    out = tmp_path / "a.json"
    done = call(*QUICK, "--drafts", 2, "--quick", "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [e["contender"] for e in result["entries"]] == ["mlx-lm", "plain", "k=2", "adaptive"]
    assert result["options"]["max_tokens"] == 4
    assert all(word in done.stdout for word in ("accepted", "over", "spread", "k=2", "(-)"))
    assert "{" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Next: mlx-mtp verify-lossless")
    (printed := tmp_path / "printed.txt").write_text("a table\n" + out.read_text())
    again = call("bench", "compare", out, printed)
    assert again.returncode == 0
    assert "compared with the earlier result" in again.stdout
    assert "1.00x" in again.stdout
    assert "not alike" not in again.stdout


def test_results_without_common_settings_are_reported(tmp_path):
    for name, loop in (("a", PLAIN), ("b", "other")):
        (tmp_path / name).write_text(json.dumps(made({loop: [10, 10]}, bench="decode", format=1)))
    done = call("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to compare" in done.stdout
    assert "nothing to compare" not in call("bench", "compare", tmp_path / "a", tmp_path / "a").stdout


def test_random_weights_and_drawn_acceptance_are_labelled(tmp_path):
    config = json.loads((demo_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    done = call(
        *("bench", "decode", "--config", tmp_path / "config.json", "--layers", 2, "--synth-rates", "1,0.5"),
        *("--rounds", 1, "-m", 12, "--drafts", "1,2", "--prompts", 1, "--contexts", "40"),
        *("--out", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    label = "random weights, the first 2 layers only; acceptance drawn at 1.0, 0.5"
    assert result["model"]["synthetic"] == label
    assert f"SYNTHETIC: {label}" in " ".join(done.stdout.split())  # a title wraps where the model's name ends
    by_loop = {e["contender"]: e for e in result["entries"]}
    assert by_loop["k=1"]["accepted"] == by_loop["k=1"]["drafted"]
    assert result["differences"] == []  # differences of drafting loops are expected and not reported
    assert {e["category"] for e in result["entries"]} == {"random_tokens"}
    assert all(e["tokens"] == [12] for e in result["entries"])


def test_exit_code_1_for_a_wrong_text(monkeypatch):
    tokens = MlxLm.tokens
    monkeypatch.setattr(MlxLm, "tokens", lambda *args: (token + 1 for token in tokens(*args)))
    done = call(*QUICK, "--no-mtp")
    assert done.returncode == 1
    assert "text differs: mlx-lm on translation, token 0 is" in done.stdout
    done = call(*QUICK, "--no-mtp", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["differences"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--synth-rates", "a"), "Invalid value for '--synth-rates': 'a'; expected probabilities"),
        (("--layers", 2), "Invalid value for '--layers': layers=2: only for random weights"),
        (("--config", "/none"), "Invalid value for '--config': File '/none' does not exist"),
        (("--drafts", "7"), "Invalid value for '--drafts': drafts=7: allowed with this model is 1 to 3"),
        (
            ("--contexts", "700,5", "--prompts", 1, "--categories", "translation"),
            "Invalid value for '--contexts': contexts=5: too short for a prompt",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(flags, message):
    done = call("bench", "decode", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
