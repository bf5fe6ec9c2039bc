"""Count the cycles, accepted drafts per depth, host waits and times of a generation."""

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from ..tuning.plan import Role
from .summary import kept_of_trees, paused, percentages, shares

TIMED_EVERY = 16
# Fields of which `add` keeps the maximum, and fields that it does not add.
LARGEST, NOT_ADDED = (
    ("num_draft_tokens", "peak_memory"),
    ("phases", "max_tokens", "paused", "trees_paused", "crowded", "whole"),
)


@dataclass
class Stats:
    """Counters of one generation; times in seconds.

    drafted, accepted: per depth, the number of the heads' drafts that were verified, and accepted; also those of the
                   drafter that replaces the heads or joins them.
    drafted_by, accepted_by: the sums of these by name in plans, such as "heads" and "block".
    lookups:       cycles that verified drafts of prompt lookup; lookup_drafted, lookup_accepted: these drafts.
    grammar_drafted, grammar_accepted: the number of drafts, verified and accepted, that the grammar forces, that
                   repeat earlier choices of the answer, or that keep the style of its separators.
    trees:         cycles that verified a draft tree; tree_drafted, tree_accepted: drafts in these, and on accepted
                   paths, of any source. They are in no other count of drafts.
    lengths:       number of cycles by the number of drafts that they verified.
    waits:         host reads in cycles: one per cycle; with p_min one more; with a grammar one more for the drafts,
                   if any, or in stepwise cycles (`Plan.stepwise`) one for each draft that is not the grammar's.
    built_late:    cycles built after the previous cycle was read, by reason; not the first, nor those that replace
                   one built ahead because the grammar has drafts.
    compiled_cycles: replayed cycles; compiled_shapes: kinds of steps recorded for replay.
    prefill_time:  seconds until the first token arrived, with the heads' prefill of the prompt; heads with windows
                   read their last rows later, in the first cycle with drafts.
    decode_time:   seconds of cycles after that, without the caller's time between two tokens.
    wait_time:     the part of decode_time in which the host waited for the device.
    mask_time:     seconds in which the host made the masks of a grammar, most of them while the device computed.
    peak_memory:   maximum bytes that MLX held, including the weights, since the generation began.
    paused:        why the next cycle does not draft although it could; "" otherwise.
    trees_paused:  why draft trees do not pay with this model, "" if they do or none was tried.
    phases:        set to True to measure `draft_time`: every 16th cycle is then computed in two timed halves.
    crowded:       set to True while cycles of other generations run in between, so that cycles are not timed.
    whole:         counters of several sequences, which also count the cycles and drafts of this one.
    """

    phases: bool = False
    num_draft_tokens: int = 0
    prompt_tokens: int = 0
    max_tokens: int = -1
    generation_tokens: int = 0
    cycles: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    lookups: int = 0
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    grammar_drafted: int = 0
    grammar_accepted: int = 0
    trees: int = 0
    tree_drafted: int = 0
    tree_accepted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    waits: int = 0
    built_late: Counter[str] = field(default_factory=Counter)
    compiled_cycles: int = 0
    compiled_shapes: int = 0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    wait_time: float = 0.0
    mask_time: float = 0.0
    peak_memory: int = 0
    paused: str = ""
    trees_paused: str = ""
    crowded: bool = False
    whole: "Stats | None" = field(default=None, repr=False)
    _halves: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _began: float = 0.0
    _first_token: float = 0.0

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second of prefill_time."""
        return self.prompt_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def generation_tps(self) -> float:
        """Tokens per second of wall time from the first token's arrival until now, including the caller's time."""
        elapsed = time.perf_counter() - self._first_token
        return self.generation_tokens / elapsed if self.generation_tokens else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Mean number of tokens per cycle, the target's own included; 1.0 is plain decoding; 0.0 before a cycle."""
        return 1 + self.every_draft[1] / self.cycles if self.cycles else 0.0

    @property
    def every_draft(self) -> tuple[int, int]:
        """Numbers of verified and of accepted drafts, of all sources."""
        drafted = sum(self.drafted) + self.lookup_drafted + self.grammar_drafted + self.tree_drafted
        return drafted, sum(self.accepted) + self.lookup_accepted + self.grammar_accepted + self.tree_accepted

    @property
    def drafts_per_cycle(self) -> float:
        """Mean number of the heads' or trees' drafts that a cycle verifies; 0.0 before a cycle."""
        return (sum(self.drafted) + self.tree_drafted) / self.cycles if self.cycles else 0.0

    @property
    def by_depth(self) -> list[float | None]:
        """Per depth, the accepted share of the heads' drafts; None for depths without drafts."""
        return shares(self.drafted, self.accepted)

    @property
    def acceptance(self) -> list[float]:
        """The shares of `by_depth` without the depths that had no drafts."""
        return [share for share in self.by_depth if share is not None]

    @property
    def summary(self) -> str:
        """One line: drafts and tokens per cycle, accepted drafts per depth and by source, why drafting is paused.

        "plain decoding" if num_draft_tokens is 0 and nothing was drafted, else "no cycles" before the first cycle.
        """
        if not self.num_draft_tokens and not self.lookups and not self.grammar_drafted:
            return "plain decoding"
        if not self.cycles:
            return "no cycles"
        words = [f"{self.tokens_per_cycle:.2f} tokens per cycle"]
        if self.num_draft_tokens:
            most = "" if self.trees else f" (at most {self.num_draft_tokens})"
            words.insert(0, f"{self.drafts_per_cycle:.1f} drafts per cycle{most}")
        if self.num_draft_tokens and (self.acceptance or not self.trees):
            words.append(f"accepted {percentages(self.by_depth)}")
        if len(self.drafted_by) > 1:
            words += [f"{self.accepted_by[name]} of {n} by {name}" for name, n in sorted(self.drafted_by.items())]
        if self.lookups:
            words.append(f"{self.lookup_accepted} of {self.lookup_drafted} looked up")
        if self.grammar_drafted:
            words.append(f"{self.grammar_accepted} of {self.grammar_drafted} from the grammar")
        if self.trees:
            words.append(kept_of_trees(self))
        return "; ".join(filter(None, [", ".join(words), paused(self.paused) or self.trees_paused]))

    @property
    def host_ms(self) -> float:
        """Mean milliseconds per cycle in which the host did not wait: it built and submitted graphs."""
        return 1000 * (self.decode_time - self.wait_time) / self.cycles if self.cycles else 0.0

    @property
    def draft_time(self) -> float:
        """The heads' part of `decode_time`, estimated from the cycles timed in halves; 0 unless `phases` was set."""
        return self.decode_time * self._halves[0] / (sum(self._halves) or 1.0)

    @property
    def verify_time(self) -> float:
        """`decode_time` less `draft_time`: the target's pass, sampling, acceptance; all of it without `phases`."""
        return self.decode_time - self.draft_time

    def add(self, other: "Stats") -> None:
        """Add another generation's counters to these: maxima become the greater ones, `paused` the other's.

        Settings such as `phases` and `max_tokens` stay.
        """
        self.paused, self.trees_paused = other.paused, other.trees_paused
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            if name in LARGEST:
                setattr(self, name, max(mine, theirs))
            elif isinstance(mine, list):
                setattr(self, name, [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)])
            elif name not in NOT_ADDED and not name.startswith("_"):
                setattr(self, name, mine + theirs)

    def expect(self, drafts: int, prompt_tokens: int, max_tokens: int) -> None:
        """Store a generation's maximum drafts per cycle and of tokens, and the length of its prompt."""
        self.num_draft_tokens, self.prompt_tokens, self.max_tokens = drafts, prompt_tokens, max_tokens

    def start(self) -> None:
        """Begin a generation: reset counts per depth and, unless in a batch, MLX's peak memory; time the prefill."""
        self.drafted, self.accepted = [0] * self.num_draft_tokens, [0] * self.num_draft_tokens
        if self.whole is None:
            mx.reset_peak_memory()
        else:
            self.whole.num_draft_tokens = max(self.whole.num_draft_tokens, self.num_draft_tokens)
            self.whole._deepen(self.num_draft_tokens)
        self._began = time.perf_counter()

    def note_peak_memory(self) -> None:
        self.peak_memory = max(self.peak_memory, mx.get_peak_memory())

    def time_phases(self, run: Any) -> None:
        """Every TIMED_EVERY cycles evaluate a run's drafts, then its verify, timing both; not for plain decoding."""
        if not self._first_token or not self.num_draft_tokens or self.cycles % TIMED_EVERY:
            return
        for half, array in enumerate((run.drafts, run.packed)):
            tic = time.perf_counter()
            mx.eval(array)
            self._halves[half] += time.perf_counter() - tic

    def note_first_token(self) -> None:
        """End the prefill's time: the first token has arrived."""
        self._first_token = time.perf_counter()
        self.prefill_time = self._first_token - self._began

    def add_time(self, seconds: float, waited: float) -> None:
        """Count one host read with its wait and a cycle's seconds. In a pool each sequence counts the whole cycle."""
        self.waits += 1
        self.decode_time += seconds
        self.wait_time += waited

    def count_cycle(
        self, drafted: int, accepted: int, source: str, forced: int = 0, drafter: Any = None, *, tree: bool = False
    ) -> None:
        """Count a cycle that verified `drafted` drafts from `source` and accepted `accepted` of them.

        forced: number of first drafts that a grammar forces, which count as the grammar's. drafter: None for
        a plain step; copies and drafts of a grammar are counted without depth. tree: the drafts are a tree's, which
        are counted by themselves. `whole`, if set, counts the cycle too.
        """
        if self.whole is not None:
            self.whole.count_cycle(drafted, accepted, source, forced, drafter, tree=tree)
        role = drafter.role if drafter else Role.MODEL
        self.cycles += 1
        self.lengths[drafted] += 1
        if tree:
            self.trees += 1
            self.tree_drafted += drafted
            self.tree_accepted += accepted
            return
        if role is Role.COPY:
            self.lookups += 1
            self.lookup_drafted += drafted
            self.lookup_accepted += accepted
            return
        forced = drafted if role is Role.GRAMMAR else forced
        self.grammar_drafted += forced
        self.grammar_accepted += min(accepted, forced)
        if role is Role.GRAMMAR:
            return
        self._deepen(drafted)
        if drafted > forced:
            self.drafted_by[source] += drafted - forced
            self.accepted_by[source] += max(0, accepted - forced)
        for depth in range(forced, drafted):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted

    def _deepen(self, depths: int) -> None:
        """Extend the counts to at least `depths` depths."""
        for counts in (self.drafted, self.accepted):
            counts += [0] * (depths - len(counts))

    def note_pause(self, reason: str, of_trees: str = "") -> None:
        """Store why drafting is paused, and why draft trees do not pay; "" for neither."""
        self.paused, self.trees_paused = reason, of_trees
        if self.whole is not None:
            self.whole.note_pause(reason, of_trees)

    def count_replays(self, cycles: int, shapes: int = 0) -> None:
        """Count replayed cycles, and newly recorded kinds of steps."""
        if self.whole is not None:
            self.whole.count_replays(cycles, shapes)
        self.compiled_cycles += cycles
        self.compiled_shapes += shapes

    def count_token(self) -> None:
        """Count a token that is yielded to the caller."""
        self.generation_tokens += 1
        self.note_peak_memory()
