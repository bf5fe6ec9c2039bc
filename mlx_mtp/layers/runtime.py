"""Store the state of one loaded model other than its weights in one object that all rooms share."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..cache.ring import MAX_ROWS
from ..ranks.group import Ranks
from .adapters import Adapters
from .kernel_site import Site


@dataclass
class Runtime:
    """State of one model, created with it; a field is None, or empty, until the package that owns it sets it.

    report: facts of the load (`checkpoint.report.Report`). ranks: the ranks that the target's layers are split over.
    untested: reads and tests the heads before they first draft; it may warn, or raise ValueError.
    sites: modules that kernels may replace. trials: trials of these kernels (`tuning.kernel_switch.ModelTrials`).
    failed: reasons for which kernels do not compile or run, by op, shape and rows.
    learned: costs of cycles on this machine (`decoding.policy.Learned`).
    recorder: the recorded cycles (`decoding.replay.Recorder`).
    adapters: the adapters that were loaded with the model, and the selected one.
    blind: why `vision` is None, and what to do, for messages to users who give pictures.
    alone: why sequences are decoded one at a time and not in a pool; None if a pool may hold several.
    choosing: whether kernels change logits and choose tokens from them, else MLX's operations.
    rows: maximum rows of a pass with drafts; None: no limit, 1: nothing is drafted.
    lane: the arithmetic of products of few rows: "exact" (MLX's, of one row) or "matrix" (`kernels/units.h`);
    "mixed" once a product of "matrix" was switched off. sums: the order in which matrices add here.
    row_check: the check of its rows (`decoding.row_check.RowCheck`), None if nothing is to be checked.
    vision: what encodes pictures (`pictures.vision.Vision`), with `mark`, the id of a picture's token in templates.
    """

    report: Any = None
    untested: Callable[[], None] | None = None
    ranks: Ranks | None = None
    sites: list[Site] = field(default_factory=list)
    trials: Any = None
    failed: dict[tuple[str, str, int], str] = field(default_factory=dict)
    learned: Any = None
    recorder: Any = None
    adapters: Adapters = field(default_factory=Adapters)
    alone: str | None = None
    choosing: bool = True
    rows: int | None = None
    lane: str = "exact"
    sums: str = ""
    row_check: Any = None
    vision: Any = None
    blind: str = "pictures need a model that was loaded with its vision tower"

    @property
    def lane_key(self) -> str:
        """What bits of a cache's rows depend on besides the model: the lane and, in "matrix", the order of sums."""
        return f"{self.lane} {self.sums}".strip()

    def fits(self, lane_key: str) -> bool:
        """Return whether rows that were computed with this `lane_key` have the bits that the model computes now."""
        return lane_key == self.lane_key and self.lane != "mixed"

    def most_drafts(self, sequences: int = 1) -> int:
        """Return the maximum drafts of each of `sequences` sequences in one pass, so that it has at most `rows`."""
        return MAX_ROWS - 1 if self.rows is None else max(0, self.rows // sequences - 1)

    def note(self, **facts: Any) -> None:
        """Replace these fields of the load report, if there is one."""
        if self.report is not None:
            self.report = replace(self.report, **facts)


class HasRuntime:
    """Mixin of a model: its `runtime`, and what of it users read."""

    runtime: Runtime

    @property
    def report(self) -> Any:
        """The facts of the load (`Report`); None for a model that no load has made."""
        return self.runtime.report

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that the model's layers are split over; None if there is only one."""
        return self.runtime.ranks

    @property
    def vision(self) -> Any:
        """What encodes pictures for the model (`Runtime.vision`); None without a vision tower."""
        return self.runtime.vision
