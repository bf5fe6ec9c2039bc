"""Train an MTP head on conversations that its target has written, and measure the head on others."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .chain import AT_ONCE, DEPTHS, Drafted, Head, Reading, hits, loss
from .target import Target

DRAFTED = 8192  # tokens that the head drafts
NOISE = 0.05
PEAK, WARMUP, LAST = 2e-3, 150, 0.02  # learning rate, steps up to it, and its last value as a share of it
BETAS, DECAY, CLIP = (0.9, 0.98), 0.05, 1.0  # of AdamW; DECAY of matrices only; the gradient's highest norm
AVERAGE, GROWTH = 0.998, 20  # of the moving average: highest weight of the old one, and the step at which it is 0.5
REPORT_EVERY, SECONDS = 200, 20  # between two measurements: this number of steps, or of seconds if shorter


class Acceptance(NamedTuple):
    """Acceptance of a head's drafts of answers.

    depths: for each depth, the share of right drafts where all earlier drafts of the cycle are right. cycle: mean
    accepted drafts of a cycle, plus 1 for the target's own token. cycles: number of measured cycles.
    """

    depths: list[float]
    cycle: float
    cycles: int


@dataclass
class Budget:
    """The end of a loop: after `steps` passes, or after `seconds` if `steps` is None.

    done: number of passes so far. began: time of `time.monotonic` when the loop began.
    """

    seconds: float
    steps: int | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def share(self) -> float:
        """Return the share of the budget that is used; 1 or more ends the loop."""
        return self.elapsed() / self.seconds if self.steps is None else self.done / self.steps


def most_frequent(target: Target, tokens: torch.Tensor, special: list[int], count: int = DRAFTED) -> torch.Tensor:
    """Return `count` sorted token ids: the special ones, and the most frequent ones in `tokens`.

    Of tokens with equal frequency the lower id is taken.
    """
    size = target.sizes.vocabulary
    score = torch.bincount(tokens.flatten().long(), minlength=size).double()
    score[special] = math.inf
    order = torch.sort(score, descending=True, stable=True)[1]
    return order[:count].sort()[0]


def drafted_of(target: Target, tokens: torch.Tensor) -> Drafted:
    """Return `Drafted` for sorted token ids."""
    ranks = torch.full((target.sizes.vocabulary,), -1, device=target.device)
    ranks[tokens] = torch.arange(len(tokens), device=target.device)
    return Drafted(ranks, target.unembedding[tokens].clone())


def new_head(target: Target, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a new head's parameters, initialised as by `mlx_mtp.training.heads.new` from the target's last layer.

    hidden: normed hidden rows of the target [..., width], for the scale of `eh_proj`.
    """
    scale = (hidden**2).mean(-1).sqrt().median()
    half, ones = torch.eye(target.sizes.width, device=target.device) * 0.5**0.5, torch.ones_like(target.norm)
    head = {"eh_proj.weight": torch.cat([half, half], -1) * scale, "enorm.weight": ones, "hnorm.weight": ones.clone()}
    head["norm.weight"] = target.norm.clone()
    return head | {f"block.{name}": weight.clone() for name, weight in target.last_layer.items()}


def measure(target: Target, head: Head, drafted: Drafted, reading: Reading) -> Acceptance:
    """Return the acceptance of a head's drafts of the answers."""
    total = torch.zeros(1 + DEPTHS, dtype=torch.long, device=target.device)
    for first in range(0, len(reading.tokens), AT_ONCE):
        total += hits(target, head, drafted, reading.rows(slice(first, first + AT_ONCE))).sum((0, 1))
    first, *later = total.tolist()
    shares = [round(right / max(1, before), 4) for right, before in zip(later, [first, *later], strict=False)]
    return Acceptance(shares, round(1 + sum(later) / max(1, first), 3), first)


def batches(reading: Reading, rows: int) -> Iterator[Reading]:
    """Yield, without end, `rows` rows of a reading; the order of each epoch is random.

    The last rows of an epoch, if fewer than `rows`, are left out. A reading with fewer rows is one batch.
    """
    count = len(reading.tokens)
    while True:
        order = torch.randperm(count, device=reading.tokens.device)
        for chosen in order.split(rows)[: max(1, count // rows)]:
            yield reading.rows(chosen)


def train(
    target: Target,
    drafted: Drafted,
    reading: Reading,
    rows: int,
    budget: Budget,
    report: Callable[[int, list[float], Head], None],
) -> dict[str, torch.Tensor]:
    """Return the moving average of a new head's parameters after training with `rows` rows a step.

    report: receives the number of steps, each depth's mean share of right drafts in the text of the steps since the
    last report, and the averaged parameters.
    """
    head = {name: torch.nn.Parameter(w) for name, w in new_head(target, reading.hidden[:4].float()).items()}
    average, optimizer = {name: w.detach().clone() for name, w in head.items()}, optimizer_of(head)
    shares, reported = [], budget.elapsed()
    for part in batches(reading, rows):
        if (used := budget.share()) >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(budget.done, used)
        value, right = loss(target, head, drafted, part, NOISE)
        value.backward()
        torch.nn.utils.clip_grad_norm_(head.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        budget.done += 1
        follow(average, head, budget.done)
        shares.append(right)
        if budget.done % REPORT_EVERY == 0 or budget.elapsed() - reported > SECONDS:
            report(budget.done, torch.stack(shares).mean(0).tolist(), average)
            shares, reported = [], budget.elapsed()
    return average


def learning_rate(step: int, used: float) -> float:
    """Return the rate after `step` steps, at the share `used` of the budget: a linear rise times a falling cosine."""
    falling = LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * used))
    return PEAK * min(1, (step + 1) / WARMUP) * falling


def optimizer_of(head: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an AdamW optimizer of a head's parameters."""
    matrices, vectors = ([w for w in head.values() if (w.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS)


@torch.no_grad()
def follow(average: dict[str, torch.Tensor], head: Head, step: int) -> None:
    """Update the moving average of the parameters after `step` steps."""
    kept = min(AVERAGE, step / (step + GROWTH))
    for name, w in average.items():
        w.lerp_(head[name], 1 - kept)
