"""Hold the state of one generation, and of each of its cycles."""

from concurrent.futures import Executor
from dataclasses import dataclass, field

from ..cache.mark import Mark
from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.kernel_fallback import Fallback
from ..tuning.plan import Fixed, Plan
from .agreement import Agreement
from .clock import Clock
from .cycle_masks import CycleMasks, mask_thread
from .drafters import drafters_of
from .drafters.drafter import Frame
from .history import TokenHistory
from .replay import Compiled
from .run import NO_DRAFTS, Drafts, Run
from .sampling import Picker
from .stats import Stats
from .step import Passed

PROMPT = Plan()  # plan of the run that chooses the first token after a prompt


@dataclass
class Flight:
    """A cycle from its plan until its tokens are yielded. Each function sets the fields of its own phase.

    begin:   plan. matched: length in tokens of the sequence's repeated suffix, 0 without prompt lookup. prefilled:
             rows that a paused drafter read for it. before: mark of the caches after the previous cycle and these
             rows. run: the step's result; `submit` builds it with p_min, from `drafts`, and with a grammar and a
             caller's sampler or processors. replayed: a recorded step was used. built: the host's seconds for it.
             late: whether it was begun after the previous cycle was read. passed: with a grammar, the rows that the
             run chooses from, which `submit` submits first (with p_min it also builds them). masks, frame: with a
             grammar, those of the step.
    submit:  base: position of its first row. after: mark of the caches after it. failed: MLX could not evaluate it.
    read:    accepted: number of accepted drafts. seconds: None if not measured. late_reason: why the next cycle
             cannot be built before this one is read; None if it can.
    """

    plan: Plan
    before: Mark
    matched: int = 0
    prefilled: int = 0
    run: Run = field(init=False)
    drafts: Drafts = NO_DRAFTS
    passed: Passed | None = None
    masks: CycleMasks | None = None
    frame: Frame = field(init=False)
    after: Mark = field(init=False)
    base: int = field(init=False)
    accepted: int = 0
    replayed: bool = False
    late_reason: str | None = None
    late: bool = False
    built: float = 0.0
    seconds: float | None = None
    failed: bool = False

    def __post_init__(self):
        self.after = self.before

    @property
    def forced(self) -> int:
        """The number of the drafter's first drafts that `Matcher.drafts` prescribes; 0 without a grammar."""
        return min(self.masks.forced[0], self.run.size - 1) if self.masks else 0


@dataclass
class Decoder:
    """The state of one generation: model, caches, sampling, settings, and its current cycles.

    control: plans each cycle and observes its outcome. drafters: by their names in plans.
    chunk:   rows per prefill chunk, of prompts and of paused drafters.
    k, max_lookup: maximum number of drafts in a cycle, from the model's drafter and from prompt lookup.
    p_min:   minimum probability of a verified draft, in cycles whose plan has p_min.
    compiled: replays recorded cycles; None to build every cycle. clock: measures the seconds of cycles.
    history: the tokens of the prompt, and those that the host has read since.
    stopping: the current cycle is the last one. thread: the executor of `mask_thread`.
    emitting, emitted: the cycle whose tokens are being yielded, and the number of these with the one being yielded;
             1 from the start for the first cycle. submitted: the cycle submitted last.
    """

    model: Target
    cache: PromptCache
    picker: Picker
    control: Controller | Fixed | Agreement
    stats: Stats
    chunk: int
    k: int
    max_lookup: int = 0
    p_min: float = 0.0
    compiled: Compiled | None = None
    history: TokenHistory = field(default_factory=TokenHistory)
    thread: Executor = field(default_factory=mask_thread)
    stopping: bool = False
    emitting: Flight = field(init=False)
    submitted: Flight = field(init=False)
    emitted: int = 0

    def __post_init__(self):
        self.fallback, self.clock = Fallback(self.model), Clock()
        self.drafters = drafters_of(self.model, self.max_lookup)

    @property
    def pending_rows(self) -> int:
        """Number of rows that the model's drafter must read before it drafts again; 0 if it follows the target."""
        drafter = next((d for d in self.drafters.values() if d.in_step), None)
        return drafter.behind(self.cache) if drafter else 0
