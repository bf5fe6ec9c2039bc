"""Generate with tiny models through the server's `answer`, with a prefix tree of chunks of four tokens."""

import numpy as np
from letters import Letters

import mlx_mtp
from mlx_mtp.serve.job import Begun, DecodeRequest, End, Job, Served, answer
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import Chunking, PrefixTree, comparisons

FIXED, LARGE = Chunking(4), 1 << 30


def serve(model, limit=LARGE, chunking=FIXED, files=None, drafts=2, **layout):
    k = min(drafts, model.max_draft_tokens)
    blank = mlx_mtp.make_prompt_cache(model, num_draft_tokens=k, **layout)
    tree = PrefixTree(blank, chunking, limit)
    return Served(model, Letters(), tree, {"num_draft_tokens": k, "adaptive": False}, None, files)


def generate(served, prompt, n=6, turns=(), **sampling):
    """Return the text and the number of reused prompt tokens."""
    events = []
    for _ in answer(served, Job(DecodeRequest(prompt, turns, n, sampling=sampling), events.append), lambda: False):
        pass
    (begun,) = [e for e in events if isinstance(e, Begun)]
    assert isinstance(events[-1], End)
    assert events[-1].stats.generation_tokens == n
    return "".join(getattr(e, "text", "") for e in events), begun.cached


def generate_two(served, prompt, **more):
    """Return a text of two tokens and the number of reused prompt tokens."""
    return generate(served, prompt, 2, **more)


def written(model, directory, *texts, turns=(18,), **layout):
    """Return a server that has answered prompts and stored their prefixes in files."""
    served = serve(model, files=PrefixFiles(directory, LARGE), **layout)
    for text in texts:
        generate_two(served, text, turns=turns)
    served.files.save(served.tree)
    return served


def restarted(model, directory, limit=LARGE, **layout):
    return serve(model, files=PrefixFiles(directory, limit), **layout)


def lines(caplog):
    return [record.message for record in caplog.records if record.name == "mlx_mtp.serve"]


def left(steps):
    """Run a generator to its end; return its value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def prompts(vocab, seed=0):
    """Return two prompts that share their first 18 tokens."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, vocab, 23).tolist()
    return first, [*first[:18], *rng.integers(0, vocab, 10).tolist()]


def rows_alike(model, blank, rows):
    """Return the result of `comparisons`."""
    *_, found = comparisons(model, blank, rows)
    return found
