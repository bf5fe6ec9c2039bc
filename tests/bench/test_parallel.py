"""Run `mlx-mtp bench parallel`: contenders take turns on the same prompts, and sequences equal those alone."""

import json
import sys

import pytest
from command_line import call

from mlx_mtp import BatchGenerator, Stats
from mlx_mtp.bench.page import tables_of
from mlx_mtp.bench.parallel import AFTER, DRAFTED, MLX_LM, PLAIN, REPLAYED, BatchRun, contenders, measure
from mlx_mtp.bench.subject import BenchPrompt, Subject
from mlx_mtp.cli import bench_options
from mlx_mtp.decoding.replay import Recorder


def test_contenders_take_turns_on_the_same_prompts(tiny_models, monkeypatch, tmp_path):
    subject = Subject(tiny_models(0)[0], None, {"name": "tiny", "synthetic": "random weights"})
    monkeypatch.setattr(bench_options, "subject_of", lambda flags: subject)
    done = call(
        "bench", "parallel", "--quick", "--texts", "2", "-m", "2", "--rounds", "1", "--out", tmp_path / "p.json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "p.json").read_text())
    assert [e["contender"] for e in found["entries"]] == ["mlx-lm", "plain", "drafted", "one after the other"]
    for entry in found["entries"]:
        assert (entry["texts"], entry["tokens"], entry["differs"]) == (2, [4], 0)
        assert 0 < entry["gaps"]["50"][0] <= entry["gaps"]["99"][0] <= entry["seconds"][0]
    (table,) = tables_of(found)
    assert table.row_count == len(found["entries"])
    assert "tok/s together" in done.stdout


def test_built_and_replayed(tiny_models, monkeypatch, recorded_at_once):
    model = tiny_models(0)[0]
    monkeypatch.setattr(model.runtime, "recorder", recorder := Recorder())
    found, missing = contenders(Subject(model, None, {}), 64, replayed=True)
    assert missing is None
    assert [*found] == [MLX_LM, PLAIN, DRAFTED, PLAIN + REPLAYED, DRAFTED + REPLAYED, AFTER]
    built = found[PLAIN]([[1, 2], [2, 3]], 4)
    assert not recorder.cycles
    assert found[PLAIN + REPLAYED]([[1, 2], [2, 3]], 4).tokens == built.tokens
    assert recorder.cycles


def test_drawn_acceptance(tiny_models):
    """The first draft is always accepted and the second rejected, alone and in a batch; texts are not compared."""
    subject = Subject(tiny_models(0)[0], None, {}, rates=(1.0, 0.0))
    with subject.acceptance():
        for n in (1, 2):
            stats = Stats()
            batch = BatchGenerator(subject.model, num_draft_tokens=2, adaptive=False, stats=stats)
            batch.insert([[1, 2, 3]] * n, [21] * n)
            while batch.next_generated():
                pass
            assert stats.accepted == [stats.cycles, 0]
    running = {AFTER: lambda prompts, most: BatchRun([[1]], 1.0, [0.1])}
    (entry,) = measure(running, [BenchPrompt("text", [1])], 1, 2, rounds=1, drawn=True)
    assert entry["differs"] is None


def test_a_sequence_that_differs_from_the_one_alone_is_counted():
    """Two of four prompts are used, evenly spaced."""
    asked = []

    def batch_of(tokens):
        return lambda prompts, most: asked.append(prompts) or BatchRun(tokens, 2.0, [0.1])

    running = {PLAIN: batch_of([[1, 2], [3, 5]]), AFTER: batch_of([[1, 2], [3, 4]])}
    prompts = [BenchPrompt("text", [i]) for i in range(4)]
    found = {e["contender"]: e for e in measure(running, prompts, 2, 2, rounds=3)}
    assert (found[PLAIN]["differs"], found[AFTER]["differs"]) == (3, 0)
    assert found[PLAIN]["seconds"] == [2.0] * 3
    assert asked == [[[0], [2]]] * 8


@pytest.mark.parametrize(
    ("columns", "terminal", "as_json", "noted"),
    [(80, True, False, True), (124, True, False, False), (80, False, False, False), (80, True, True, False)],
)
def test_a_terminal_narrower_than_the_tables_is_noted_before_the_measurements(
    columns, terminal, as_json, noted, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    bench_options.note_width(as_json=as_json)
    expected = "The tables have up to 124 columns, this terminal 80: widen it, or give --html FILE.\n"
    assert capsys.readouterr().err == expected * noted
