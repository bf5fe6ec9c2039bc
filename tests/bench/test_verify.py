"""Check `bench verify`: dependent chains, the loop's own pass, the model's parts, and the command."""

import itertools
import json
import math
import time
from types import SimpleNamespace

import command_line
import families
import mlx.core as mx
import mlx.nn as nn
import pytest
from sweep import sampled

import mlx_mtp
from mlx_mtp.bench import timing, verify, verify_parts
from mlx_mtp.bench.census import operations
from mlx_mtp.bench.page import tables_of
from mlx_mtp.bench.result import curve_title
from mlx_mtp.bench.timing import Call
from mlx_mtp.bench.verify import CurvePlan, Kernels, VerifyPass, curve_table, measure
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.cache.ring import MAX_ROWS
from mlx_mtp.layers.mamba2 import Mamba2

CONTEXT = 20
TEXT = [(7 * i + i // 5) % 5 for i in range(CONTEXT + 2 * MAX_ROWS)]


# Chains


def evaluated(monkeypatch, calls, steps, start=0):
    """Return the operations that a chain has computed at its end."""
    seen = []
    monkeypatch.setattr(timing.mx, "eval", lambda *arrays: seen.append(operations(*arrays)))
    timing.chain_seconds(calls, steps, start)
    return seen[-1]


def test_every_call_runs_in_its_turn(monkeypatch):
    x = mx.ones((2, 4))
    calls = [
        Call(lambda x: [mx.exp(x), mx.tanh(x)], x),
        Call(lambda x: [mx.sin(x)], x),
        Call(lambda x: [mx.cos(x)], x),
    ]
    found = evaluated(monkeypatch, calls, 7)
    assert [found[name] for name in ("Exp", "Tanh", "Sin", "Cos")] == [3, 3, 2, 2]
    found = evaluated(monkeypatch, calls, 2, start=4)
    assert [found[name] for name in ("Exp", "Tanh", "Sin", "Cos")] == [0, 0, 1, 1]


def test_the_links_are_the_chain_without_the_calls(monkeypatch):
    x = mx.ones((2, 4))
    calls = [Call(lambda x: [mx.exp(x), mx.tanh(x)], x), Call(lambda x: [mx.sin(x)], x)]
    full, links = (evaluated(monkeypatch, each, 5) for each in (calls, timing.links(calls)))
    assert full - links == {"Exp": 3, "Tanh": 3, "Sin": 2}
    assert not links - full


def test_a_chain_does_not_change_what_calls_read():
    seen = []

    def spoil(x):
        seen.append(x)
        return [x * math.nan, x - math.inf]

    timing.chain_seconds([Call(spoil, mx.arange(4.0).reshape(1, 4))], 3)
    assert [x.tolist() for x in seen] == [[[0, 1, 2, 3]]] * 3


def test_the_time_of_the_links_is_subtracted(monkeypatch):
    taken = {"call": 10.0, "link": 4.0}
    calls = [Call(lambda x: [x + 1], mx.zeros(1))] * 2
    turns = []

    def seconds(chosen, steps, start=0):
        turns.append(("call" if chosen is calls else "link", start))
        return steps * taken[turns[-1][0]] + next(noise)

    noise = itertools.chain([0, 0], itertools.cycle([5, 0, 3]))
    monkeypatch.setattr(timing, "chain_seconds", seconds)
    turn = timing.Timed(calls, 8)
    assert [turn(), turn()] == [6.0, 6.0]
    assert len({place for kind, place in turns[2:] if kind == "call"}) == 6
    taken["link"] = 11.0
    assert turn() > 0


def test_steps_are_whole_turns_of_about_the_requested_time(monkeypatch):
    monkeypatch.setattr(timing, "chain_seconds", lambda calls, steps, start=0: 0.001 * steps)
    calls = [Call(lambda x: [x], mx.zeros(1))] * 10
    assert timing.steps_for(calls, 0.05) == 50
    assert timing.steps_for(calls, 0.0001) == 10
    assert timing.steps_for(calls, 100) == 4090


# The whole


FAMILIES = ["step", "qwen3_5_moe", "nemotron_h", "deepseek_v3", "mimo_v2_flash"]


# Windows and experts, recurrent layers, latent attention.
@pytest.fixture(scope="module", params=sampled(["step", "nemotron_h", "deepseek_v3"], FAMILIES))
def both(request, tiny_models, tmp_path_factory):
    """Return (our model, mlx-lm's) of one random checkpoint."""
    if request.param == "step":
        return tiny_models()
    path, _, plain = families.build(request.param, tmp_path_factory.mktemp("family"))
    return mlx_mtp.load_model(path), plain


def test_repeated_passes_equal_the_pass_of_the_target(both):
    model, plain = both
    expected = mx.argmax(plain(mx.array(TEXT)[None])[0], axis=-1).tolist()
    whole = VerifyPass(model, TEXT, CONTEXT, 11)
    for rows in (2, 1, 16, 2, 5, 1, 16):
        whole(rows)
        start = CONTEXT + rows
        found = whole.graph(rows, start, rows)
        assert found.tokens.tolist() == [expected[start : start + rows]], rows
        mx.eval(whole.cache.arrays)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_pass_computes_everything_the_next_one_reads(both, monkeypatch, rows):
    whole, left, real = VerifyPass(both[0], TEXT, CONTEXT, 64), [], time.perf_counter
    monkeypatch.setattr(verify, "perf_counter", lambda: left.append(operations(*whole.cache.arrays)) or real())
    whole.run(rows, CONTEXT, 0)
    before, after = left
    assert before
    assert not after


def slowed(monkeypatch, model, slow):
    """Replace the clock: an evaluation takes a second, or three after a pass whose number of rows is slow."""
    now, taken, hidden, real = [0.0], [0.0], type(model).hidden, mx.eval

    def noted(self, tokens, cache):
        taken[0] = 3.0 if slow(tokens.shape[1]) else 1.0
        return hidden(self, tokens, cache)

    def evaluated(*arrays):
        real(*arrays)
        now[0] += taken[0]

    monkeypatch.setattr(type(model), "hidden", noted)
    monkeypatch.setattr(verify.mx, "eval", evaluated)
    monkeypatch.setattr(verify, "perf_counter", lambda: now[0])


def test_slower_rows_are_measured_as_such(tiny_models, monkeypatch):
    model = tiny_models()[0]
    slowed(monkeypatch, model, lambda rows: rows == 4)
    whole = next(measure(model, TEXT, Kernels(model, "off"), CurvePlan((1, 2, 4), (CONTEXT,), 3), 64))
    assert whole["seconds"]["stock"] == {1: [1.0] * 3, 2: [1.0] * 3, 4: [3.0] * 3}


# The parts


def test_projections_are_all_linear_layers_outside_experts(both, monkeypatch):
    model = both[0]
    inputs = {id(m): mx.zeros((1, MAX_ROWS, 32)) for m in verify_parts.target_modules(model)}
    parts = {part.name: part for part in verify_parts.parts_of(model, (), inputs)}
    called, real = [], nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: called.append(self) or real(self, x))
    for call in parts["projections"].calls(3):
        assert call.x.shape[1] == 3
        call.op(call.x)
    named = list(model.named_modules())
    outer = [f"{name}." for name, m in named if "switch_mlp" in m or isinstance(m, Mamba2)]
    outer += ["mtp.", "lm_head", "language_model.lm_head"]
    expected = [m for name, m in named if isinstance(m, nn.Linear) and not name.startswith(tuple(outer))]
    assert expected
    assert sorted(map(id, called)) == sorted(map(id, expected))


def test_experts_get_the_inputs_of_the_model(tiny_models):
    model = tiny_models()[0]
    blocks = [layer.mlp for layer in model.layers if "switch_mlp" in layer.mlp]
    with verify_parts.expert_inputs(model) as inputs:
        VerifyPass(model, TEXT, CONTEXT, 64).run(MAX_ROWS, CONTEXT, 0)
    assert [layer.mlp for layer in model.layers if "switch_mlp" in layer.mlp] == blocks
    assert inputs.keys() == {id(block) for block in blocks}
    first = next(layer for layer in model.layers if "switch_mlp" in layer.mlp)
    cache = mlx_mtp.make_prompt_cache(model, num_draft_tokens=0)
    x, seen = model.model.embed_tokens(mx.array(TEXT)[None]), {}
    for layer, c in zip(model.layers, cache.layers, strict=True):
        mask = c.make_mask(len(TEXT))
        if layer is first:
            h = x + layer.self_attn(layer.input_layernorm(x), mask, c)
            seen = layer.post_attention_layernorm(h)
            break
        x = layer(x, mask=mask, cache=c)
    rows = slice(CONTEXT, CONTEXT + MAX_ROWS)
    assert mx.allclose(inputs[id(first.mlp)], seen[:, rows], atol=1e-4)
    part = next(part for part in verify_parts.parts_of(model, (), inputs) if part.name == "experts")
    calls = part.calls(3)
    assert [call.x.shape for call in calls] == [(1, 3, 32)] * len(blocks)
    found = [call.op(call.x)[0].flatten().tolist() for call in calls]
    assert sorted(found) == sorted(block(inputs[id(block)][:, :3]).flatten().tolist() for block in blocks)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("context", [5, 70])
def test_attention_is_over_the_context_and_the_rows(tiny_models, rows, context):
    model = tiny_models()[0]
    part = next(p for p in verify_parts.parts_of(model, (context,), {}) if p.name == "attention")
    assert part.context == context
    calls = part.calls(rows)
    assert len(calls) == len(model.layers)
    for _ in range(2):
        for call, layer, window in zip(calls, model.layers, model.windows(), strict=True):
            site, cache, at = call.op.args[:3]
            (out,) = call.op(call.x)
            assert site.module is layer.self_attn
            keys, values = cache.parts
            assert (at.item() if isinstance(at, mx.array) else at) == context
            assert mx.allclose(out, attended(site, call.x, keys, values, context, window), atol=1e-5)


def attended(site, x, keys, values, context, window):
    """Attend every row to its allowed positions, one row and head at a time."""
    form, rows = site.form, x.shape[1]
    q = x.reshape(rows, form.heads, form.head_dim)
    out = mx.zeros((1, form.heads, rows, form.value_dim))
    for row, head in itertools.product(range(rows), range(form.heads)):
        last = context + row
        slots = [p % keys.shape[2] for p in range(max(0, last - (window or 10**9) + 1), last + 1)]
        kv = head * form.kv_heads // form.heads
        scores = mx.softmax(site.module.scale * (keys[0, kv, mx.array(slots)] @ q[row, head]))
        out[0, head, row] = scores @ values[0, kv, mx.array(slots)]
    return out


def test_parts_are_those_that_the_model_has(both):
    model = both[0]
    inputs = {id(m): mx.random.normal((1, MAX_ROWS, 32)) for m in verify_parts.target_modules(model)}
    names = [part.name for part in verify_parts.parts_of(model, (CONTEXT,), inputs)]
    kinds = set(model.windows())
    assert names[0] == "projections"
    assert names[-1] == "LM head"
    assert ("experts" in names) is any("switch_mlp" in m for m in verify_parts.target_modules(model))
    assert ("recurrent" in " ".join(names)) is (RecurrentCache in kinds)
    assert "attention" in names


def test_the_head_chooses_the_targets_tokens(tiny_models):
    model = tiny_models()[0]
    hidden = mx.random.normal((1, 3, 32))
    (tokens,) = verify_parts.chosen(model, hidden)
    assert tokens.flatten().tolist() == mx.argmax(model.logits(hidden), axis=-1).flatten().tolist()


# The whole command


def test_every_curve_has_every_round(tiny_models):
    model = tiny_models()[0]
    curves = list(measure(model, TEXT, Kernels(model, "off"), CurvePlan((1, 3), (9, CONTEXT), 2, seconds=1e-5), 64))
    titles = ["whole at 9", "whole at 20", "projections", "attention at 9", "attention at 20", "experts", "LM head"]
    assert [curve_title(curve) for curve in curves] == titles
    for curve in curves:
        assert {m: len(times) for m, times in curve["seconds"]["stock"].items()} == {1: 2, 3: 2}
        assert min(itertools.chain(*curve["seconds"]["stock"].values())) > 0


def test_kernels_are_switched_off_and_on_again():
    kernels = Kernels.__new__(Kernels)
    kernels.rows = [frozenset({1, 2}), frozenset({4})]
    kernels.sites = [SimpleNamespace(rows=rows) for rows in kernels.rows]
    assert kernels.sides == ("stock", "ours")
    with kernels.only("ours"):
        assert [site.rows for site in kernels.sites] == kernels.rows
    with pytest.raises(ZeroDivisionError), kernels.only("stock"):
        1 / len(set.union(*(set(site.rows) for site in kernels.sites)))
    assert [site.rows for site in kernels.sites] == kernels.rows


def test_a_side_is_timed_with_its_kernels(tiny_models, monkeypatch):
    """A replacement kernel that is three times as slow as stock."""
    model = tiny_models()[0]
    kernels = Kernels(model, "off")
    kernels.sites, kernels.rows = [SimpleNamespace(rows=frozenset({2}))], [frozenset({2})]
    slowed(monkeypatch, model, lambda rows: rows in kernels.sites[0].rows)
    whole = next(measure(model, TEXT, kernels, CurvePlan((1, 2), (CONTEXT,), 2), 64))
    found = {side: seconds[2] for side, seconds in whole["seconds"].items()}
    assert found == {"ours": [3.0] * 2, "stock": [1.0] * 2}


def test_a_table_marks_inconclusive_values():
    seconds = {"stock": {"1": [1.0] * 9, "2": [1.5] * 9}}
    sure = {"name": "whole", "context": 8, "seconds": seconds}
    seconds = {"stock": {"1": [1.0] * 9, "2": [1.5, 2.0, 1.0] * 3}}
    unsure = {"name": "LM head", "context": None, "seconds": seconds}
    table = curve_table([sure, unsure], "stock", "T")
    assert [list(column.cells) for column in table.columns] == [
        ["1, ms", "2"],
        ["1000.000", "1.50"],
        ["1000.000", "1.50?"],
    ]
    assert "inconclusive" in table.caption
    assert curve_table([sure], "stock", "T").caption is None


@pytest.mark.parametrize(
    ("change", "message"), [({"rows": (1, 17)}, "rows=17: allowed"), ({"contexts": (0,)}, "contexts=0")]
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CurvePlan(**{"rows": (1, 2), "contexts": (8,), "rounds": 1, **change})


def test_a_model_without_a_port_is_refused():
    with pytest.raises(ValueError, match="one row at a time"):
        Kernels(nn.Linear(2, 2), None)


def test_the_command_writes_its_result(tmp_path):
    few = ("--rows", "2", "--contexts", "16", "--rounds", 1, "--quick", "--out", tmp_path / "v.json")
    few = (*few, "--synth-rates", "0.5")
    done = command_line.call("bench", "verify", *few)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "v.json").read_text())
    assert [curve["name"] for curve in found["curves"]] == ["whole", "projections", "attention", "experts", "LM head"]
    assert found["options"]["rows"] == [1, 2]
    assert "demo, SYNTHETIC: acceptance drawn at 0.5" in " ".join(done.stdout.split())
    assert [t.title for t in tables_of(found)] == ["T(M)/T(1), demo, SYNTHETIC: acceptance drawn at 0.5, stock"]
    if not mx.metal.is_available():
        assert "ours = stock modules: kernels need Metal, and this machine has no Metal GPU." in done.stdout
        assert all(curve["seconds"].keys() == {"stock"} for curve in found["curves"])


def test_rows_that_are_not_numbers_are_one_error_line():
    done = command_line.call("bench", "verify", "--rows", "17")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--rows" in done.stderr
