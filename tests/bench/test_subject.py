"""Check benchmark subjects: released shapes with random weights, drawn acceptance, and their restrictions."""

import json
import math
from contextlib import suppress
from pathlib import Path

import families
import mlx.core as mx
import mlx_lm
import pytest
from command_line import call, one_line_error
from mlx.utils import tree_flatten
from published import FILES, read
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.bench import subject
from mlx_mtp.bench.decode import LoopSettings, MlxLm, PrefilledLoop, twin
from mlx_mtp.bench.random_model import first_layers, head_count, random_model
from mlx_mtp.bench.subject import (
    DEPTHS,
    POSITIONS,
    NothingRemembered,
    drawn_acceptance,
    draws,
    open_subject,
    rate_at,
    reset_costs,
)
from mlx_mtp.checkpoint.build import read_args
from mlx_mtp.decoding import policy, step
from mlx_mtp.demo import demo_path
from mlx_mtp.models import find_port
from mlx_mtp.tuning.cost_file import RememberedCosts

RELEASED = [file for file in FILES if not file.stem.startswith("eagle3")]  # an EAGLE-3 head is not a model
PROMPT = [1, 5, 3, 9, 2, 7]


@pytest.fixture
def config(tmp_path):
    def write(config: dict):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        return file

    return write


def generated(model, k, n=8, **options):
    stats = mlx_mtp.Stats()
    options = {"prompt_lookup": False, "adaptive": False, **options}
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=k, stats=stats, **options)
    return [token for token, *_ in steps], stats


def lazily(config):
    """Return the port's model without computing it."""
    port = find_port(config)
    heads = head_count(config, port.Model.SPEC)
    return port.Model(read_args(port, demo_path(), config), heads, port.Model.SPEC.resolve(()))


def shapes(model) -> dict:
    return {name: (array.shape, array.dtype) for name, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", sampled([*families.FAMILIES][::3], families.FAMILIES))
def test_random_models_of_every_family_decode_losslessly(name, config):
    model = random_model(config(families.FAMILIES[name].config), group_size=32)
    assert len(model.mtp) == (3 if name == "mimo_v2_flash" else 1)
    assert model.report.target_quantization.startswith("4-bit")
    logits = model.logits(model.hidden(mx.array([PROMPT]), mlx_mtp.make_prompt_cache(model).layers))
    assert mx.isfinite(logits).all().item()
    assert 0.1 < mx.std(logits).item() < 10
    text, _ = generated(model, 0)
    drafted, stats = generated(model, 2)
    assert drafted == text
    assert stats.drafted
    if name == "glm_moe_dsa_shared":
        with pytest.raises(ValueError, match="cannot run this model"):
            twin(model)
    else:
        theirs = PrefilledLoop(MlxLm(twin(model)), PROMPT, LoopSettings(max_tokens=8)).read().run()
        assert theirs.tokens == text


@pytest.mark.parametrize("file", sampled(RELEASED[::6], RELEASED), ids=lambda file: file.stem)
def test_the_first_layers_are_the_released_ones(file):
    released = read(file).config
    whole, cut = lazily(released), lazily(first_layers(released, 5))
    assert len(cut.layers) == 5
    expected = {name: shape for name, shape in shapes(whole).items() if _kept(name, 5)}
    assert shapes(cut) == expected
    assert cut.head_windows() == whole.head_windows()
    assert cut.windows() == whole.windows()[: len(cut.windows())]


def _kept(name: str, layers: int) -> bool:
    number = next((part for part in name.split(".") if part.isdigit()), None)
    return name.startswith("mtp.") or number is None or int(number) < layers


@pytest.mark.parametrize("layers", [1, 2, 10])
def test_entries_of_the_heads_are_kept(layers):
    demo = json.loads((demo_path() / "config.json").read_text())
    cut = first_layers(demo, layers)
    for name in ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits"):
        assert cut[name] == demo[name][:layers] + demo[name][10:]
    kept = [i for i in (5, 9) if i < layers]
    experts = [i for i in map(int, cut["moe_layers_enum"].split(",")) if i < layers + 3]
    assert experts == kept
    assert cut["eos_token_id"] == demo["eos_token_id"]


def test_no_weight_is_held_in_full_precision(config):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096, "num_hidden_layers": 8}
    file = config({**families.MIMO, **sizes})
    mx.synchronize()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    model = random_model(file)
    made, peak = mx.get_active_memory() - held, mx.get_peak_memory() - held
    largest = max(a.nbytes for _, a in tree_flatten(model.parameters()))
    assert made > 10e6
    assert peak < made + 4 * largest  # its random bits as numbers, one module at a time


def test_random_weights_repeat_and_have_the_right_variance(config):
    file = config({**families.MIMO, "hidden_size": 256, "intermediate_size": 512, "attention_bias": True})
    for bits in sampled((3, 16), (3, 4, 8, 16)):
        one, two = (dict(tree_flatten(random_model(file, bits=bits).parameters())) for _ in range(2))
        other = dict(tree_flatten(random_model(file, bits=bits, seed=1).parameters()))
        assert all(mx.array_equal(one[name], two[name]) for name in one)
        name = "model.layers.0.mlp.down_proj"
        assert not mx.array_equal(one[f"{name}.weight"], other[f"{name}.weight"])
        weight = one[f"{name}.weight"]
        if bits < 16:
            weight = mx.dequantize(weight, one[f"{name}.scales"], one[f"{name}.biases"], 64, bits)
        assert weight.shape == (256, 512)
        assert mx.var(weight).item() * 512 == pytest.approx(1, rel=0.05)
        assert abs(mx.mean(weight).item()) < 3 / math.sqrt(weight.size * 512)


def test_the_stated_quantization_is_used(config):
    stated = {"group_size": 32, "bits": 8, "lm_head": {"group_size": 32, "bits": 6}}
    model = random_model(config({**families.MIMO, "quantization": stated}))
    assert (model.lm_head.bits, model.model.layers[0].mlp.up_proj.bits) == (6, 8)
    assert random_model(config({**families.MIMO, "quantization": stated}), bits=16).report.target_quantization == (
        "not quantized (float32)"
    )


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "gpt2"}, {}, "model_type 'gpt2' has no port; allowed are"),
        ({"model_type": None}, {}, "expected an object with a model_type"),
        ({"num_attention_heads": "many"}, {}, "no model can be built from it"),
        ({}, {"layers": 0}, r"layers=0: allowed is 1 to 3"),
        ({}, {"layers": 4}, r"layers=4: allowed is 1 to 3"),
        ({}, {"synth_rates": [1.5]}, r"synth_rates=1.5: allowed is between 0 and 1"),
        ({}, {"synth_rates": [0.5, 0.6]}, r"synth_rates=0.6: allowed is at most 0.5, the rate of the depth before"),
        ({}, {"synth_rates": [0.5], "mtp": False}, "no heads that draft"),
        ({}, {"model": "demo"}, "not together with a checkpoint"),
        ({}, {"adapter_path": ("a",), "vision": True}, "not together with .*adapter_path"),
    ],
)
def test_mistakes_are_one_line(config, changes, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_subject(config=config({**families.MIMO, **changes}), group_size=32, **options)
    assert "\n" not in str(caught.value)


def test_a_missing_config_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    for path, message in ((tmp_path / "b.json", "cannot be read"), (tmp_path / "a.json", "not valid JSON")):
        with pytest.raises(ValueError, match=message):
            open_subject(config=path)
    with pytest.raises(ValueError, match="layers=2: only for random weights"):
        open_subject(layers=2)


def test_facts_of_a_subject(config):
    drawn = open_subject(config=config(families.MIMO_V2), layers=2, group_size=32, synth_rates=[0.9, 0.5])
    assert drawn.synthetic == "random weights, the first 2 layers only; acceptance drawn at 0.9, 0.5"
    assert (drawn.tokenizer, drawn.stop_tokens, drawn.facts["layers"], drawn.facts["heads"]) == (None, (), 2, 3)
    assert drawn.facts["target_bytes"] == sum(
        a.nbytes for n, a in tree_flatten(drawn.model.parameters()) if not n.startswith("mtp.")
    )
    demo = open_subject("demo")
    assert demo.stop_tokens == tuple(sorted(demo.tokenizer.eos_token_ids)) != ()
    assert (demo.facts["name"], demo.synthetic, demo.facts["dtype"], demo.rates) == ("demo", None, "float32", ())
    assert json.loads(json.dumps(demo.facts)) == demo.facts


@pytest.mark.parametrize("command", [["doctor"], ["bench", "verify"], ["bench", "decode"]])
def test_commands_load_what_their_options_state(command, monkeypatch, tmp_path):
    def load(path, **more):
        raise ValueError(f"{path} {more}")

    monkeypatch.setattr(subject, "load", load)
    monkeypatch.chdir(tmp_path)
    words = "--adapter-path a --adapter-path b --mtp-path h --no-mtp --draft-model d --draft-vocab v --no-vision"
    made = call(*command, *words.split(), "--vision-path", "t", "--trust-remote-code")
    given = {"adapter_path": ("a", "b"), "mtp_path": "h", "mtp": False, "draft_model": "d", "draft_vocab": "v"}
    given |= {"vision": False, "vision_path": "t", "tokenizer_config": {"trust_remote_code": True}}
    error = one_line_error(made)
    assert error.startswith(f"error: {demo_path()} ")
    assert all(f"{name!r}: {value!r}" in error for name, value in given.items())


def test_a_subject_has_the_given_name(config, tmp_path, monkeypatch):
    (tmp_path / "Qwen3.6-27B").symlink_to(demo_path())
    monkeypatch.setattr(subject, "find_checkpoint", lambda name: tmp_path / "Qwen3.6-27B")  # the hub's cache
    assert open_subject("of/Step-3.5-Flash").facts["name"] == "Step-3.5-Flash"
    monkeypatch.chdir(config(families.MIMO_V2).parent)
    assert open_subject(config=Path("config.json"), group_size=32).facts["name"] == tmp_path.name


def expected_lengths(right: list[list[bool]], k: int, first: int, n: int) -> tuple[list[int], list[int]]:
    """Return drafts and accepted drafts per depth for n tokens, computed from the table of draws alone."""
    drafted, accepted = [0] * k, [0] * k
    position, left = first, n - 1
    while left > 0:
        run = next((d for d in range(k) if not right[position % POSITIONS][d]), k)
        for depth in range(k):
            drafted[depth] += 1
            accepted[depth] += depth < run
        position, left = position + run + 1, left - run - 1
    return drafted, accepted


@pytest.fixture
def drawn(config):
    """Return a function of rates that creates a subject with three small heads and drawn acceptance."""
    return lambda rates=(): open_subject(config=config(families.MIMO_V2), group_size=32, synth_rates=rates)


def test_texts_of_drawn_acceptance_have_no_stop_tokens():
    assert open_subject(synth_rates=[0.8, 0.6]).stop_tokens == ()  # a draft may be anything


@pytest.mark.parametrize("k", sampled([1, 3], [1, 2, 3]))
def test_drafts_are_accepted_as_drawn(drawn, k):
    subject = drawn([0.8, 0.6])
    right = draws([0.8, 0.6], 0).tolist()
    with subject.acceptance():
        text, stats = generated(subject.model, k, 20)
        drawn_text, stats_drawn = generated(subject.model, k, 20, temp=0.7, seed=3)
    # The first token follows the prompt; the first cycle's first draft follows the first token.
    expected = expected_lengths(right, k, len(PROMPT) + 1, 20)
    assert (stats.drafted, stats.accepted) == expected
    assert (stats_drawn.drafted, stats_drawn.accepted) == expected
    assert len(text) == len(drawn_text) == 20


def test_certain_draws_are_certain_and_the_text_is_the_drafts(drawn):
    subject = drawn()
    for rate, most in ((0.0, 0), (1.0, 3)):
        with drawn_acceptance([rate]):
            _, stats = generated(subject.model, 3, 21)
        assert stats.accepted == [stats.cycles * (most > 0)] * 3
    plain = generated(subject.model, 0)
    with drawn_acceptance([0.5]):
        assert generated(subject.model, 0)[0] == plain[0]


def test_rates_are_the_shares_of_right_drafts_and_continue_to_fall():
    right = draws([0.9, 0.6], 7)
    shares = right.astype(mx.float32).mean(axis=0).tolist()
    assert shares == pytest.approx([0.9 * (2 / 3) ** depth for depth in range(DEPTHS)], abs=0.02)
    assert mx.array_equal(right, draws([0.9, 0.6], 7))
    assert not mx.array_equal(right, draws([0.9, 0.6], 8))
    assert [round(rate_at([0.87, 0.76, 0.69], depth), 3) for depth in (0, 1, 2, 3)] == [0.87, 0.76, 0.69, 0.626]
    assert (rate_at([0.8], 2), rate_at([0, 0], 5), rate_at([1, 1], 9)) == (pytest.approx(0.512), 0, 1)


@sweep
def test_rates_are_the_shares_in_results(drawn):
    subject = drawn([0.87, 0.76, 0.69])
    with subject.acceptance():
        _, stats = generated(subject.model, 3, 280)
    kept = [a / d for a, d in zip(stats.accepted, stats.drafted, strict=True)]
    assert kept == pytest.approx([0.87, 0.76, 0.69], abs=0.08)  # about 85 cycles


def test_nothing_is_drawn_after_the_block():
    pick = step.pick
    with suppress(KeyboardInterrupt), drawn_acceptance([1.0]):
        assert step.pick is not pick
        raise KeyboardInterrupt
    assert step.pick is pick


def test_replayed_cycles_use_new_draws(drawn):
    subject = drawn([0.8, 0.6])
    with subject.acceptance():
        _, stats = generated(subject.model, 2, 80, compile_cycles=True)
    assert stats.compiled_cycles > 10
    assert (stats.drafted, stats.accepted) == expected_lengths(draws([0.8, 0.6], 0).tolist(), 2, len(PROMPT) + 1, 80)


def test_a_benchmark_stores_no_costs(drawn, monkeypatch):
    kept = []
    monkeypatch.setattr(RememberedCosts, "keep", lambda *args: kept.append(args))
    subject = drawn()
    generated(subject.model, 2, 30, adaptive=True)
    assert policy.learned(subject.model).recall(replayed=False) is not None
    reset_costs(subject.model)
    assert policy.learned(subject.model).recall(replayed=False) is None
    assert kept == []
    assert NothingRemembered().recall_compiled() is None


def test_the_twin_equals_the_model_that_mlx_lm_loads():
    subject = open_subject()
    theirs, _ = mlx_lm.load(str(demo_path()))
    theirs.set_dtype(mx.float32)
    own = dict(tree_flatten(twin(subject.model).parameters()))
    loaded = dict(tree_flatten(theirs.parameters()))
    assert own.keys() == loaded.keys()
    assert all(mx.array_equal(own[name], loaded[name]) for name in own)
    ours = dict(tree_flatten(subject.model.parameters()))
    assert all(own[name] is ours[name] for name in own)  # shares the arrays
    assert type(twin(subject.model)) is type(theirs)
