"""Learn what a cycle costs from whole cycles' seconds: a Kalman filter over the logarithms of the arms' costs.

An arm is (source, k): k drafts of MTP heads or of the text, verified in k + 1 rows; ("heads", 0) is the plain step.
Its total, drafting and verifying together, is what decisions need.
Logarithms make noise of some per cent alike for all arms, and a machine that is slower as a whole a common shift.
The prior is the mean and the covariance of a family of cost curves, 1 + (verify + draft) k plain steps, so that one
arm's measurement moves its neighbours, and nothing need be measured to be guessed.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

Source = Literal["heads", "lookup"]
Arm = tuple[Source, int]
PLAIN: Arm = ("heads", 0)

# Plain steps that one more row costs to verify (memory-bound ... reference BLAS), and one draft of the heads.
VERIFY = (0.02, 0.06, 0.12, 0.25, 0.45, 0.8, 1.2)
DRAFT = (0.02, 0.06, 0.15)
BEND = 0.15  # how far a curve strays from its family: sd of the logarithm per unit of log(1 + k)
NOISE = 0.2  # sd of the logarithm of one cycle's seconds
FACTOR = 0.5  # sd of the common factor by which known costs may be off, and of the plain step's own
UNKNOWN = 5.0
# Sds that a cycle adds: the machine's clock, rows beyond the first against it, each arm on its own.
CLOCK, ROWS, OWN = 0.012, 0.02, 0.004
SURPRISE = 3.0  # sds
LEAST = 0.05  # plain steps that any drafts cost at least
CATCH_UP = 0.01  # plain steps per row that idle heads read, until measured; its own sd
REMEMBERED = 64  # drafts of a depth, beyond which older ones count half
# Times seen in a run that count as measured, what is then the same (logarithm), and runs until the most trust.
OFTEN, SAME, CONFIRMED = 3, 0.25, 2
ROW_DOUBT = 0.003  # the sd of that which stays, so that newer catch-ups count


def ladder(most: int) -> list[int]:
    """List draft lengths worth trying, ascending, 1..most: each up to 8, then a third more each time, and `most`."""
    rungs = [k for k in (1, 2, 3, 4, 5, 6, 7, 8, 11) if k < most]
    return [*rungs, most] if most else []


class Costs:
    """Seconds per arm on one machine with one model.

    max_drafts, max_lookup: the most drafts of the heads and of the text. known: what earlier runs measured; it may
    be off, as a whole and in its ratios, and what is measured now outweighs it.
    """

    def __init__(self, max_drafts: int, max_lookup: int = 0, known: "Costs | None" = None):
        lookups = [k for k in ladder(max_lookup) if k in (3, 7) or k == max_lookup]
        self.arms: list[Arm] = [PLAIN, *(("heads", k) for k in ladder(max_drafts)), *(("lookup", k) for k in lookups)]
        self.index = {arm: i for i, arm in enumerate(self.arms)}
        mean, cov = _prior(self.arms)
        self.seen = [0] * len(self.arms)  # times measured in this run
        self.row = CATCH_UP  # plain steps per row that idle heads read
        self._row_variance = CATCH_UP**2
        self.measured: set[Arm] = set()
        self.drafts: list[list[float]] = []  # per depth of the heads: right ones and all, of this and earlier runs
        self.confirmed = 0  # generations in a row that measured what had been known
        self._before: dict[Arm, float] = {}  # logarithms of plain steps
        self._suspect: tuple[Arm | None, bool] | None = None  # the last cycle was not believed: arm, whether too slow
        factor = UNKNOWN
        if known is not None and known.measured:
            mean = np.array([known._log(arm) for arm in self.arms])
            self.measured = known.measured & set(self.arms)
            cov[0, 0] += FACTOR**2
            cov /= (1 + min(known.confirmed, CONFIRMED)) ** 2
            self.confirmed = known.confirmed
            self._before = {arm: known._log(arm) - known.mean[0] for arm in self.measured}
            self.row, factor = known.row, 2.0
            self.drafts = [[*counts] for counts in known.drafts]
        rows = np.array([float(k > 0) for _, k in self.arms])
        # Lists: a step of the filter on so few arms takes NumPy ten times as long between two cycles.
        self.mean: list[float] = mean.tolist()
        self.cov: list[list[float]] = (cov + factor**2).tolist()
        self._drift = (CLOCK**2 + ROWS**2 * np.outer(rows, rows) + OWN**2 * np.eye(len(rows))).tolist()

    @property
    def unknown(self) -> bool:
        """Tell whether nothing is known of a plain step's time beside the others."""
        return not self.seen[0] and not self.confirmed

    def seconds(self, arm: Arm) -> float:
        """Estimate the seconds of a cycle of this arm; any k up to the largest."""
        return math.exp(self._log(arm))

    def steps(self, arm: Arm) -> float:
        """Estimate the same in plain steps; rows are never free: an unlucky plain step must not flatter drafts."""
        return max(math.exp(self._log(arm) - self.mean[0]), 1 + LEAST * min(arm[1], 1))

    def spread(self, arm: Arm, other: Arm) -> float:
        """Give the sd of the logarithm of one arm's cost over another's."""
        i, j = self.index[arm], self.index[other]
        return math.sqrt(max(0.0, self.cov[i][i] + self.cov[j][j] - 2 * self.cov[i][j]))

    def doubt(self, arm: Arm) -> float:
        """Give the sd of the logarithm of an arm's cost."""
        return math.sqrt(self.cov[self.index[arm]][self.index[arm]])

    def observe(self, arm: Arm, seconds: float, caught_up: int = 0) -> bool:
        """Learn from one cycle; False where its time says nothing about its arm.

        The first cycle of an arm compiles its kernels and any may meet the garbage collector: one that is far too
        slow counts only when the arm's next is, too; one that is far too fast when the next of any arm is.
        """
        i, noise, whole = self.index[arm], NOISE**2, seconds
        if caught_up:
            seconds, noise = self._without_rows(arm, whole, caught_up)
        surprise = math.log(seconds) - self.mean[i]
        deviation = math.sqrt(self.cov[i][i] + noise)
        far = abs(surprise) > SURPRISE * deviation or (not self.seen[i] and surprise > 2 * deviation)
        self.seen[i] += 1
        sign = (arm if surprise > 0 else None, surprise > 0)
        if far and self._suspect != sign:
            self._suspect = sign
            return False
        self._suspect = None
        if caught_up and not far:
            self._learn_rows(arm, whole, caught_up)
        if far:  # all arms alike, and this one a little on its own
            self.cov = [[value + surprise**2 for value in row] for row in self.cov]
            self.cov[i][i] += (surprise / 2) ** 2
            self.seen = [int(j == i) for j in range(len(self.arms))]
        self._update(i, surprise, noise)
        self.measured.add(arm)
        return True

    def drafted(self, verified: int, accepted: int) -> None:
        """Count drafts of the heads whose predecessors were right; older ones count less and less."""
        self.drafts += [[0.0, 0.0] for _ in range(len(self.drafts), verified)]
        for depth, counts in enumerate(self.drafts[: min(verified, accepted + 1)]):
            counts[0] += depth < accepted
            counts[1] += 1
            if counts[1] > REMEMBERED:
                counts[:] = [n / 2 for n in counts]

    def drift(self, cycles: int = 1) -> None:
        """Take everything for a little less certain: cycles have passed."""
        self.cov = [
            [value + cycles * more for value, more in zip(*rows, strict=True)]
            for rows in zip(self.cov, self._drift, strict=True)
        ]

    def confirm(self) -> None:
        """Count, at a run's end, that what had been known was measured again and is still so; or begin anew."""
        again = [arm for arm in self._before if arm != PLAIN and self.seen[self.index[arm]] >= OFTEN]
        if again and self.seen[0] >= OFTEN:
            errors = [abs(self._log(arm) - self.mean[0] - self._before[arm]) for arm in again]
            self.confirmed = self.confirmed + 1 if max(errors) < SAME else 0

    def _update(self, i: int, surprise: float, noise: float) -> None:
        """Step the filter: arm i was measured, its logarithm `surprise` above its mean, with variance `noise`."""
        column = [row[i] for row in self.cov]
        gain = [value / (column[i] + noise) for value in column]
        self.mean = [mean + g * surprise for mean, g in zip(self.mean, gain, strict=True)]
        self.cov = [
            [value - g * c for value, c in zip(row, column, strict=True)]
            for row, g in zip(self.cov, gain, strict=True)
        ]

    def _without_rows(self, arm: Arm, seconds: float, rows: int) -> tuple[float, float]:
        """Take from seconds what idle heads' reading is thought to take; and the variance of their logarithm."""
        steps, plain = self.steps(arm), self.seconds(PLAIN)
        noise = NOISE**2 + rows**2 * self._row_variance / steps**2
        return max(seconds - self.row * rows * plain, LEAST * plain), noise

    def _learn_rows(self, arm: Arm, seconds: float, rows: int) -> None:
        """Learn what the rows took of the seconds that were not expected, by their doubt beside the arm's."""
        steps = self.steps(arm)
        excess = seconds / self.seconds(PLAIN) - steps - self.row * rows
        of_arm = steps**2 * (NOISE**2 + self.spread(arm, PLAIN) ** 2)
        total = of_arm + rows**2 * self._row_variance
        self.row = max(0.0, self.row + excess * rows * self._row_variance / total)
        self._row_variance = max(self._row_variance * of_arm / total, ROW_DOUBT**2)

    def _log(self, arm: Arm) -> float:
        """Estimate the logarithm of an arm's seconds; between and beyond measured k, straight in log(1 + k)."""
        if arm in self.index:
            return self.mean[self.index[arm]]
        source, k = arm
        own = [(n, self.index[s, n]) for s, n in self.arms if s == source or n == 0]
        if len(own) < 2:  # no arms of this source
            own = sorted((n, i) for (_, n), i in self.index.items())
        if len(own) < 2:
            return self.mean[0] + math.log(1 + (VERIFY[3] + DRAFT[1]) * k)
        at = min(max(bisect_left(own, (k, -1)), 1), len(own) - 1)
        (a, i), (b, j) = own[at - 1], own[at]
        share = math.log((1 + k) / (1 + a)) / math.log((1 + b) / (1 + a))
        return self.mean[i] + share * (self.mean[j] - self.mean[i])

    def to_json(self) -> dict[str, Any]:
        """Give what `from_json` reads: seconds per measured arm, plain steps per row caught up, drafts counted."""
        arms = [[*arm, self.seconds(arm)] for arm in self.arms if arm in self.measured]
        return {"seconds": arms, "catch_up": self.row, "drafts": self.drafts, "confirmed": self.confirmed}

    @classmethod
    def from_json(cls, kept: Any) -> "Costs":
        """Read costs of an earlier run; ValueError where `to_json` cannot have written this."""
        try:
            arms = {(source, k): seconds for source, k, seconds in kept["seconds"]}
            row = float(kept["catch_up"])
            drafts = [[float(right), float(seen)] for right, seen in kept.get("drafts", [])]
            confirmed = int(kept.get("confirmed", 0))
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"no costs: {kept!r}") from e
        good = all(s in ("heads", "lookup") and type(k) is int and 0 <= k <= 64 for s, k in arms)
        good = good and all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in arms.values())
        good = good and all(0 <= right <= seen <= REMEMBERED for right, seen in drafts)
        if not good or not 0 <= row < math.inf or confirmed < 0:
            raise ValueError(f"no costs: {kept!r}")
        most = {s: max((k for source, k in arms if source == s), default=0) for s in ("heads", "lookup")}
        costs = cls(most["heads"], most["lookup"])
        costs.row, costs.drafts, costs.confirmed = row, drafts, confirmed
        for arm, seconds in arms.items():
            if arm in costs.index:  # as if measured often; its neighbours follow
                i = costs.index[arm]
                costs._update(i, math.log(seconds) - costs.mean[i], noise=1e-6)
                costs.measured.add(arm)
        return costs


def _prior(arms: Iterable[Arm]) -> tuple[np.ndarray, np.ndarray]:
    """Make mean and covariance of log cost in plain steps over the family of curves."""
    ks = np.array([k for _, k in arms])
    drafted = np.array([float(source == "heads") for source, _ in arms])
    curves = np.array([np.log1p((a + d * drafted) * ks) for a in VERIFY for d in DRAFT])
    length = np.log1p(ks)
    bend = BEND**2 * np.minimum.outer(length, length)
    return curves.mean(axis=0), np.cov(curves.T).reshape(len(ks), len(ks)) + bend
