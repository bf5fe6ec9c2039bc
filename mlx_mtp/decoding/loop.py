"""Decode one prompt: prefill it, choose the first token, then run the driver's cycles."""

from collections.abc import Callable, Generator, Iterable

from .driver import Driver
from .prefill import prefill, test_heads
from .sequence import Sequence, Yielded, first_tokens


def decode(
    driver: Driver,
    sequence: Sequence,
    prompt: list[int],
    progress: Callable[[int, int], None] | None = None,
) -> Generator[Yielded, None, None]:
    """Yield (token, its logprobs [V] or None, whether it was drafted) for each new token, the stop token included.

    Ends where the sequence ends; without remaining tokens it only prefills. Then, and also after `close()`, the cache
    contains every token but the last one yielded. progress: called with (prompt tokens read, prompt tokens).
    """
    if sequence.k:
        test_heads(driver.model)
    sequence.stats.start()
    sequence.cache.begin(sequence.cache.offset + len(prompt))
    how = {"heads": sequence.k > 0, "chunk": driver.how.chunk, "progress": progress}
    hidden = prefill(driver.model, sequence.cache, prompt, **how)
    if sequence.remaining == 0:
        return
    run, first = first_tokens(driver.model, sequence, hidden)
    try:
        driver.join(sequence, run)
        driver.open()
        sequence.append(first)
        yield from _counted(driver, sequence, [(first[0], run.logprobs_of(0), False)])
        while not (sequence.finished or driver.stopping):
            for new in driver.cycle():
                yield from _counted(driver, sequence, new.yielded())
        if sequence.error:
            raise sequence.error
    finally:
        driver.close()


def _counted(driver: Driver, sequence: Sequence, new: Iterable[Yielded]) -> Generator[Yielded, None, None]:
    """Yield the tokens of a cycle, and note each one for the case that the consumer closes the generator."""
    for count, each in enumerate(new, 1):
        driver.emit(count)
        sequence.stats.count_token()
        yield each
