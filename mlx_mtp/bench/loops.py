"""Time generations of the loops that are compared: mlx-lm's own, and ours.

All begin alike: a prompt but for its last token is read once, and each generation continues a copy of that cache.
"""

import copy
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..cache.prompt_cache import make_prompt_cache
from ..decoding.stats import Stats
from ..generate import generate_step
from ..machine.errors import first_line


@dataclass(frozen=True)
class LoopSettings:
    """Options that all loops share; `kv_bits` of the target's cache, `mtp_kv_bits` of the heads', None: 16 bits."""

    max_tokens: int = 128
    temp: float = 0.0
    seed: int = 0
    stop_tokens: Collection[int] = ()
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    mtp_kv_bits: int | None = None
    kv_group_size: int = 64


@dataclass
class MlxLm:
    """mlx-lm's own loop and model class (see `twin`). weights: bytes of what a loop uses of the model."""

    model: Any
    name: str = "mlx-lm"
    weights: int = 0
    stats: Stats | None = None

    def new_cache(self, settings: LoopSettings) -> Any:
        return mlx_lm_make_prompt_cache(self.model)

    def tokens(self, prompt: list[int], cache: Any, max_tokens: int, settings: LoopSettings) -> Iterator[int]:
        mx.random.seed(settings.seed)
        steps = mlx_lm_generate_step(
            mx.array(prompt),
            self.model,
            max_tokens=max_tokens,
            sampler=make_sampler(settings.temp) if settings.temp else None,
            prompt_cache=cache,
            prefill_step_size=settings.prefill_step_size,
            kv_bits=settings.kv_bits,
            kv_group_size=settings.kv_group_size,
            quantized_kv_start=0,
        )
        for token, _ in steps:
            yield token  # type: ignore[misc] - an int, whatever the annotation says
            if token in settings.stop_tokens:
                return


@dataclass
class Ours:
    """Our loop with some options of `generate_step`.

    drafts: the most per cycle, None is its default. stats: of the newest generation.
    """

    model: Any
    name: str
    drafts: int | None
    options: dict[str, Any] = field(default_factory=dict)
    weights: int = 0
    stats: Stats | None = None

    def new_cache(self, settings: LoopSettings) -> Any:
        return make_prompt_cache(
            self.model,
            num_draft_tokens=self.drafts,
            kv_bits=settings.kv_bits,
            mtp_kv_bits=None if self.drafts == 0 else settings.mtp_kv_bits,
            kv_group_size=settings.kv_group_size,
        )

    def tokens(self, prompt: list[int], cache: Any, max_tokens: int, settings: LoopSettings) -> Iterator[int]:
        self.stats = Stats()
        steps = generate_step(
            prompt,
            self.model,
            max_tokens=max_tokens,
            num_draft_tokens=self.drafts,
            prompt_cache=cache,
            stats=self.stats,
            **{name: getattr(settings, name) for name in ("prefill_step_size", "temp", "seed", "stop_tokens")},
            **self.options,
        )
        return (token for token, *_ in steps)


Loop = MlxLm | Ours


def twin(model: Any) -> Any:
    """Make mlx-lm's own model of the target, which shares our model's arrays, so that it costs no memory.

    Raises ValueError where mlx-lm's class has other parameters, or cannot run it.
    """
    base: Any = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("mlx_lm.models."))
    theirs = base(model.args)
    arrays: Any = tree_flatten(model.parameters())
    modules: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if "scales" in m]
    quantized = {path: {"group_size": m.group_size, "bits": m.bits, "mode": m.mode} for path, m in modules}
    nn.quantize(theirs, class_predicate=lambda path, _: quantized.get(path, False))
    try:
        theirs.load_weights([(name, array) for name, array in arrays if not name.startswith("mtp.")])
        theirs.eval()
        theirs(mx.zeros((1, 1), mx.int32), cache=mlx_lm_make_prompt_cache(theirs))  # shapes only: nothing is computed
    except Exception as e:  # mlx-lm's own, of any kind
        raise ValueError(f"mlx-lm's {base.__module__} cannot run this model: {first_line(e)}") from e
    return theirs


@dataclass(frozen=True)
class TimedRun:
    """One generation: its tokens, seconds from the first of them to the last, bytes at its peak, what it counted."""

    tokens: list[int]
    seconds: float
    peak: int
    stats: Stats | None


@dataclass
class Reader:
    """A loop that has read a prompt but for its last token; `run` generates from there, as often as one likes.

    seconds, peak: of the reading; 0 where the prompt is a single token.
    """

    loop: Loop
    prompt: list[int]
    settings: LoopSettings
    cache: Any = None
    seconds: float = 0.0
    peak: int = 0

    def read(self) -> "Reader":
        held = _begin()
        self.cache = self.loop.new_cache(self.settings)
        tic = time.perf_counter()
        if self.prompt[1:]:
            for _ in self.loop.tokens(self.prompt[:-1], self.cache, 0, self.settings):
                raise AssertionError("a token where none was asked for")
            mx.synchronize()
            self.seconds = time.perf_counter() - tic
        self.peak = mx.get_peak_memory() - held + self.loop.weights
        return self

    def run(self) -> TimedRun:
        """Generate once. A peak is what this loop alone asks for: its weights, its cache, its temporary arrays."""
        held = _begin()
        model = self.loop.model
        cache = copy.deepcopy(self.cache, {id(model): model})
        steps = self.loop.tokens(self.prompt[-1:], cache, self.settings.max_tokens, self.settings)
        tokens, seconds = timed(steps)
        mx.synchronize()  # what was submitted and not asked for is nobody else's time
        return TimedRun(tokens, seconds, mx.get_peak_memory() - held + self.loop.weights, self.loop.stats)


def timed(steps: Iterator[int]) -> tuple[list[int], float]:
    """Collect all tokens, and the seconds from the first to the last."""
    tokens = [next(steps)]
    tic = time.perf_counter()
    tokens.extend(steps)
    return tokens, time.perf_counter() - tic


def _begin() -> int:
    """Begin to look for a peak; bytes held now, from which on it counts."""
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()
