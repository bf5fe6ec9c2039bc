"""Check that the colours of pictures are visible and distinguishable, also for dichromats."""

import itertools

import pytest
from pictures import THEMES, drawn

from mlx_mtp.bench import plots
from mlx_mtp.bench.panels import GridPanel


@pytest.mark.parametrize("scheme", THEMES)
def test_colours_are_visible(scheme):
    theme = THEMES[scheme]
    assert plots.contrast(theme.ink, theme.paper) > 12
    assert all(plots.contrast(colour, theme.paper) >= 3 for colour in theme.series[:7])
    assert len(set(theme.series)) == len(theme.series) <= len(plots.MARKERS)
    for grid, ax in drawn("decode", scheme):
        if isinstance(grid, GridPanel):
            for text, value in zip(ax.texts, itertools.chain(*grid.values), strict=True):
                assert plots.contrast(text.get_color(), ax.collections[0].cmap(value / 100)) > 4.5


# A dichromat's view of linear RGB. Source: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


def lab(colour, seen):
    """Return CIELAB of a colour, for full colour vision or a dichromat."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    if seen:
        linear = [min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in SEEN[seen]]
    xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    ratios = [sum(a * b for a, b in zip(row, linear, strict=True)) / w for row, w in zip(xyz, white, strict=True)]
    x, y, z = (r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("seen", [None, *SEEN])
@pytest.mark.parametrize("scheme", THEMES)
def test_colours_are_distinguishable(scheme, seen):
    """The first five colours, enough for most pictures; markers distinguish the others."""
    for a, b in itertools.combinations(THEMES[scheme].series[:5], 2):
        distance = sum((x - y) ** 2 for x, y in zip(lab(a, seen), lab(b, seen), strict=True)) ** 0.5
        assert distance > 25, (a, b)
