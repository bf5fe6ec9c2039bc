"""Draw the pictures of made-up results, with matplotlib."""

import functools

import pytest
from results import decode_result, kernels_result, profile_result, verify_result

from mlx_mtp.bench import panels, plots
from mlx_mtp.bench.roofline import assemble

pytest.importorskip("matplotlib", reason="needs matplotlib: the extra plot, or test")
from matplotlib.backends.backend_agg import FigureCanvasAgg

THEMES = {"light": plots.LIGHT, "dark": plots.DARK}


def model_result(name="Step-3.5-Flash", chip="M3 Ultra", rows=range(2, 9)):
    on = assemble.find_chip(chip)
    return assemble.bench_model(assemble.find_model(name, on_chip=on is not None), on, 32768, rows)


RESULTS = {
    "decode": decode_result,
    "decode at contexts": lambda: decode_result(contexts=(512, 4096, 32768)),
    "decode, noisy": lambda: decode_result(noise=0.4),
    "decode, synthetic": lambda: decode_result(synthetic="random weights, the first 4 layers only; drawn acceptance"),
    "verify": verify_result,
    "verify, noisy stock": lambda: verify_result(sides=("stock",), noise=0.5),
    "profile": profile_result,
    "profile without drafts": lambda: profile_result(k=0),
    "kernels": kernels_result,
    "kernels, emulated": lambda: kernels_result(timed=False),
    "model": model_result,
    "model, dense": lambda: model_result("Qwen3.6-27B"),
    "model without a chip": lambda: model_result("demo", None, (2, 4)),
}


@functools.cache
def found_in(name):
    return RESULTS[name]()


def drawn(name, scheme="light"):
    """Return (panel, its axes) of every picture of a result, laid out."""
    return _drawn(name, scheme)


@functools.cache
def _drawn(name, scheme):
    pairs = []
    with plots.style(THEMES[scheme]):
        for panel in panels.panels(found_in(name)):
            figure = plots.figure([panel], THEMES[scheme])
            FigureCanvasAgg(figure)
            figure.draw_without_rendering()
            pairs.append((panel, figure.axes[0]))
    return pairs
