"""Every model type of mlx-lm has mlx-lm's greedy text, with drafts if its row of docs/model_types.md has any."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import type_runs as runs
from model_types import NOT_RUN, model_types, save, tiny_config
from sweep import SWEEP, sweep

from bench import supported_types as table
from mlx_mtp.models import port_names

PAGE = table.PAGE.read_text()
ROWS = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
TYPES = [name for name in model_types() if name not in NOT_RUN]
FIRST, _, LONGEST = runs.PROMPTS
SHORT = 10  # tokens: prompt and text exceed the window of 8


def alone(model: Any, truth: Callable, file: Path) -> None:
    text = truth(FIRST)
    assert runs.with_wrong(model, FIRST + text, FIRST, SHORT, 3, 0) == text


def copied(model: Any, truth: Callable, file: Path) -> None:
    assert runs.with_lookup(model, LONGEST, SHORT) == truth(LONGEST)


def batched(model: Any, truth: Callable, file: Path) -> None:
    texts = [truth(prompt) for prompt in runs.PROMPTS]
    assert runs.together(model, runs.PROMPTS, texts, 3, 0) == texts


def resumed(model: Any, truth: Callable, file: Path) -> None:
    text = truth(FIRST)
    assert runs.resumed(model, file, FIRST, text, 4, 3) == text


WAYS = (alone, copied, batched, resumed)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_has_mlx_lms_text_and_its_row_of_the_table(model_type, tmp_path):
    """A default run has one way of drafting for each type."""
    model, plain = runs.loaded(save(tmp_path / "model", tiny_config(model_type)))
    assert ROWS[model_type] == table.row(model_type, model.report.port)

    def truth(prompt: list[int]) -> list[int]:
        return runs.plain_text(plain, prompt, SHORT)

    if "| plain |" in ROWS[model_type]:
        assert runs.drafted(model, FIRST, SHORT) == truth(FIRST)
        return
    for way in WAYS if SWEEP else [WAYS[TYPES.index(model_type) % len(WAYS)]]:
        way(model, truth, tmp_path / "cache.safetensors")


def test_the_table_has_every_type_once_and_counts_them():
    rows = list(ROWS.values())
    assert list(ROWS) == model_types()
    assert PAGE == table.page(PAGE, rows)
    written = {name for name, line in ROWS.items() if "| written |" in line}
    assert {name for name in port_names() if name in ROWS} <= written
