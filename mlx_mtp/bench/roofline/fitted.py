"""Read what `python -m bench.cost_model.fit` made of published times: constants of chips, errors of predictions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .chips import CHIPS, Chip

FILE = Path(__file__).with_name("fitted.json")


def read_fitted() -> dict[str, Any]:
    """Read the shares of each chip and how many times they were fitted to, and the validation.

    chips: by name usable, issue, fitted_to. validation: as a result has it. summary, tables: what is printed of it.
    """
    return json.loads(FILE.read_text())


def fitted_chips() -> dict[str, Chip]:
    """Give all of CHIPS with their two fitted shares."""
    found = read_fitted()["chips"]
    return {
        name: replace(chip, usable=found[name]["usable"], issue=found[name]["issue"]) for name, chip in CHIPS.items()
    }
