"""A kernel that does not compile is off alone, in its trial, in a later graph, and in the next process."""

import warnings
from dataclasses import replace

import mlx.core as mx
import pytest
import tiny
from quantized_models import STEP, quantized
from stand_in import FIRST, MESSAGE, SITES, standing_in, switched_on
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.kernels import _first_launch, _source
from mlx_mtp.machine.errors import refusal
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_fallback import WITHOUT_TRIAL, KernelRefused, failed_kernels, fall_back

CONFIG = {**tiny.CONFIG, **tiny.SHORTER, "vocab_size": 18}
PROMPT = [1, 2, 3, 0, 2, 2, 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("fallback"), CONFIG, tiny.random_weights(CONFIG))


@pytest.fixture
def supported_sites(monkeypatch, quick_trials, own_cache):
    """Restrict sites to those that the stand-in supports, with one draw and an empty cache directory."""
    place = kernel_switch.place
    monkeypatch.setattr(
        kernel_switch, "place", lambda model, **lane: [s for s in place(model, **lane) if s.op in SITES]
    )


@pytest.fixture
def model(checkpoint):
    return mlx_mtp.load_model(checkpoint)


def text(model, **options):
    steps = mlx_mtp.generate_step(PROMPT, model, **{"max_tokens": 8, "adaptive": False, **options})
    return [token for token, *_ in steps]


def on(model, op):
    return {key[2] for key, verdict in model.runtime.trials.verdicts.items() if key[0] == op and verdict.on}


@pytest.mark.parametrize("how", sampled(["evaluate"], ["construct", "call", "evaluate"]))
def test_a_kernel_that_fails_in_its_trial_is_off_and_in_the_next_load(checkpoint, supported_sites, monkeypatch, how):
    place = kernel_switch.place
    two = ("add_norm", "verify_gemv")
    monkeypatch.setattr(
        kernel_switch, "place", lambda model, **lane: [s for s in place(model, **lane) if s.op in two]
    )
    want = text(mlx_mtp.load_model(checkpoint), num_draft_tokens=3)

    def refuses(op, template):
        return how if op == "add_norm" else None

    for load in range(2):
        with standing_in(refuses) as maker, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = mlx_mtp.load_model(checkpoint, kernels="exact")
            assert ("add_norm" in maker.calls) == (load == 0 and how != "construct")
            assert text(model, num_draft_tokens=3) == want
        warned = [str(w.message) for w in caught]
        assert len(warned) == (load == 0)
        assert all("kernel add_norm" in line and "float32" in line and "\n" not in line for line in warned)
        assert not on(model, "add_norm")
        assert on(model, "verify_gemv") >= set(range(2, 9))
        (line,) = [line for line in model.report.kernels if line.startswith("add_norm")]
        assert "M=1-8 off (fails with" in line
        assert [failed.kernel.split()[0] for failed in failed_kernels(model)] == ["add_norm"]


def test_a_kernel_that_fails_later_is_off_at_that_row_count(model):
    """Heads read five rows in a cycle with three drafts, a load tries up to four."""
    want = text(model, num_draft_tokens=3)

    def refuses(op, template):
        return "evaluate" if op == "verify_gemv" and template.get("ROWS") == 5 else None

    with standing_in(refuses), pytest.warns(UserWarning, match="kernel verify_gemv .*, M=5: fails with"):
        assert text(switched_on(model), num_draft_tokens=3) == want
    assert on(model, "verify_gemv") & set(range(9)) == {2, 3, 4, 6, 7, 8}
    assert on(model, "add_norm") == on(model, "verify_head") == set(range(1, 17))
    assert {line.rows[0] for line in failed_kernels(model)} == {5}


def test_the_line_names_the_kernel_and_the_first_error(model):
    refused = standing_in(lambda op, template: "call" if op == "add_norm" else None)
    with refused, pytest.warns(UserWarning, match="add_norm") as caught:
        text(switched_on(model))
    (line,) = [str(w.message) for w in caught]
    assert line.startswith("kernel add_norm is wrong with mlx")
    assert "stays off: 32 eps 1e-05 float32, M=1: fails with ValueError: " + FIRST in line


@pytest.mark.parametrize(("message", "line"), [
    (MESSAGE, FIRST),
    ("Thread group size (1024) is greater\nthan the maximum", "Thread group size (1024) is greater"),
    ("", ""),
])  # fmt: skip
def test_the_first_compiler_error_is_reported(message, line):
    assert refusal(RuntimeError(message)) == "RuntimeError" + (f": {line}" if line else "")


@pytest.fixture(scope="module")
def quantized_checkpoint(tmp_path_factory):
    config = {**tiny.CONFIG, **STEP, "quantization": {"group_size": 32, "bits": 4}}
    return tiny.save(tmp_path_factory.mktemp("quantized"), config, quantized(tiny.random_weights(config)))


def split(model, op):
    return {m for site in model.runtime.sites if site.op == op for m in site.split}


@sweep
def test_rows_are_split_where_metal_refuses_them_together(quantized_checkpoint, supported_sites):
    """Twelve or eight rows of sums per thread are refused; the heads read seven rows with five drafts."""
    want = text(mlx_mtp.load_model(quantized_checkpoint), num_draft_tokens=3)

    def refuses(op, template):
        return "evaluate" if op == "verify_qmm" and template.get("ROWS") in (8, 12) else None

    with standing_in(refuses), warnings.catch_warnings():
        warnings.filterwarnings("error", "kernel ")
        model = mlx_mtp.load_model(quantized_checkpoint, kernels="exact")
        assert text(model, num_draft_tokens=3) == want
    assert on(model, "verify_qmm") == {1, *range(2, 9)}
    assert split(model, "verify_qmm") == {7, 8}
    assert any("verify_qmm" in line and "M=7-8 on (asked for, rows split)" in line for line in model.report.kernels)
    assert not failed_kernels(model)


def test_split_rows_that_metal_refuses_are_off(quantized_checkpoint):
    """A group of four rows is launched for three and four rows, and for five split rows."""
    model = mlx_mtp.load_model(quantized_checkpoint)
    want = text(model, num_draft_tokens=3)

    def refuses(op, template):
        return "evaluate" if op == "verify_qmm" and template.get("ROWS") == 4 else None

    with standing_in(refuses):
        found = switched_on(model).runtime.trials
        for key, verdict in found.verdicts.items():
            found.verdicts[key] = replace(verdict, split=key[0] == "verify_qmm" and key[2] == 5)
        kernel_switch.put_on(model, found)
        with pytest.warns(UserWarning, match="kernel verify_qmm .*fails with"):
            assert text(model, num_draft_tokens=3) == want
    assert on(model, "verify_qmm") & set(range(9)) == {1, 2, 6, 7, 8}


def test_sites_switched_on_without_a_trial(model):
    want = text(model, num_draft_tokens=3)
    kernel_switch.place(model)
    sites = [site for site in model.runtime.sites if site.op in SITES]
    with standing_in(lambda op, template: "evaluate" if op == "verify_head_merge" else None):
        for site in sites:
            site.rows = frozenset(range(1, 17))
        with pytest.warns(UserWarning, match="verify_head"):
            assert text(model, num_draft_tokens=3) == want
    assert {site.op for site in sites if not site.rows} == {"verify_head"}


def test_a_kernel_without_a_trial_is_replaced_by_mlx(model):
    """The stand-in does not support it; the site of the LM head stays on."""
    options = {"temp": 1.0, "top_k": 4, "seed": 5, "num_draft_tokens": 3}
    want = text(model, **options)
    with standing_in(), pytest.warns(UserWarning, match="kernel choose_rows"):
        assert text(switched_on(model), **options) == want
    assert not model.runtime.choosing
    assert on(model, "verify_head")
    assert ("choose_rows logits", (1,)) in [entry[:2] for entry in failed_kernels(model)]


def test_each_kernel_without_a_trial_exists():
    assert {*WITHOUT_TRIAL} <= {file.stem for file in _source.DIRECTORY.glob("*.metal")}


def test_a_lack_of_memory_is_no_refusal(model, monkeypatch):
    with standing_in() as maker:
        switched_on(model)
        run, failed = _first_launch.Launch.run, []

        def short(launch):
            failed.append(launch.key)
            return RuntimeError("[malloc] Unable to allocate 4096 bytes.")

        monkeypatch.setattr(_first_launch.Launch, "run", short)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text(model)
        monkeypatch.setattr(_first_launch.Launch, "run", run)
    assert failed
    assert "add_norm" in maker.calls
    assert on(model, "add_norm") == set(range(1, 17))


def test_without_a_kernel_the_error_is_raised(model, monkeypatch):
    with pytest.raises(KernelRefused):
        fall_back(model, KernelRefused([]))

    def broken(*_):
        raise RuntimeError("[eval] broken")

    monkeypatch.setattr(mx, "async_eval", broken)
    with pytest.raises(RuntimeError, match=r"^\[eval\] broken$"):
        text(model)
