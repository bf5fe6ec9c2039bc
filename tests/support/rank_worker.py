"""Run functions of this module as a rank in its own process; arguments: their names and options, alternating."""

import json
import os
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
import picture_prompts
import pytest
import type_runs as runs
from mlx.utils import tree_flatten
from oracle import Oracle
from plans import Listed, follow
from stand_in import standing_in, switched_on
from tree_drafts import TreeDrafts, TreeScript, drafted_by

import mlx_mtp
from mlx_mtp.tuning.plan import Plan

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2, 4, 4, 1]


def generated(model, n: int = 24, **options) -> list[int]:
    return [token for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=n, adaptive=False, **options)]


def rows_apart(model, rows: int = 8) -> int:
    """Count the values of hidden rows that differ between one pass over all rows and single rows."""
    caches = [mlx_mtp.make_prompt_cache(model) for _ in range(2)]
    for cache in caches:
        list(mlx_mtp.generate_step(PROMPT, model, prompt_cache=cache, max_tokens=0, num_draft_tokens=0))
    tokens, found = mx.array([[1, 0, 2, 3, 3, 1, 0, 4][:rows]]), []
    for cache, width in zip(caches, (rows, 1), strict=True):
        parts = []
        for i in range(0, rows, width):
            at = len(PROMPT) + i
            for layer in cache.layers:
                layer.seek(mx.array([at]), at)
            parts.append(model.hidden(tokens[:, i : i + width], cache.layers))
            mx.eval(parts[-1])
        found.append(np.array(mx.concatenate(parts, axis=1).astype(mx.float32)))
    return int((found[0] != found[1]).sum())


def continued(model, file: Path, plain: list[int], k: int) -> dict[str, list[int]]:
    """Return tokens of generations that continue from a cache with pending drafts, from its file, and read again.

    The last file is of another lane than the model on the last rank, so that all ranks read its tokens again.
    """
    cache, options = mlx_mtp.make_prompt_cache(model), {"adaptive": False, "num_draft_tokens": k}
    steps = mlx_mtp.generate_step(PROMPT, model, prompt_cache=cache, max_tokens=len(plain), **options)
    first = [next(steps)[0] for _ in range(9)]
    steps.close()
    mlx_mtp.save_prompt_cache(file, cache)
    found, copy, ranks = {}, mlx_mtp.load_prompt_cache(file, model), model.ranks
    model.runtime.lane = "matrix" if ranks and ranks.rank == ranks.size - 1 else "exact"
    again = mlx_mtp.load_prompt_cache(file, model)
    model.runtime.lane = "exact"
    for name, kept in (("live", cache), ("read", copy), ("read again", again)):
        steps = mlx_mtp.generate_step(
            first[-1:], model, prompt_cache=kept, max_tokens=len(plain) - len(first), **options
        )
        found[f"plain continued {name}"] = first + [token for token, _, _ in steps]
    return found


def texts(path: str, group, *, few: bool = False) -> dict:
    """Return tokens by method of decoding, differing row values, bytes per parameter, and logits.

    few: only a short sample of the methods.
    """
    model, wrong = mlx_mtp.load_model(path, tensor_group=group), {"partly": set(range(1, 99, 3))}
    limit, n = model.max_draft_tokens, 10 if few else 24
    if not few:
        wrong |= {"right": set(), "wrong": set(range(99))}
    plain = generated(model, n, num_draft_tokens=0)
    found = {"plain": plain, "seeded": generated(model, n, num_draft_tokens=0, temp=1.0, seed=7)}
    start = len(PROMPT)
    for k in {min(3, limit), *({} if few else {1})} if limit else ():
        found[f"seeded {k}"] = generated(model, n, num_draft_tokens=k, temp=1.0, seed=7)
        for name, positions in wrong.items():
            drafts = [0] * start + plain
            model.drafter = Oracle(model, drafts, {start + i for i in positions})
            found[f"plain {k} {name}"] = generated(model, n, num_draft_tokens=k)
        model.drafter = None
    if not few:
        found |= continued(model, Path(path) / "cache", plain, min(3, limit))
        found["plain looked up"] = generated(
            model, n, prompt_lookup=True, **({"num_draft_tokens": 1} if limit else {})
        )
    parameters = dict(tree_flatten(model.parameters()))
    logits = model.logits(model.hidden(mx.array([PROMPT]), mlx_mtp.make_prompt_cache(model).layers))
    return {
        "texts": found,
        "rows apart": rows_apart(model, 4 if few else 8),
        "bytes": {n: a.nbytes for n, a in parameters.items() if ".layers." in n and not n.startswith("mtp.")},
        "logits": np.array(logits.astype(mx.float32)).tolist(),
    }


def drafted(path: str, group, drafter: str) -> dict:
    """Return texts with a small model as drafter, and the numbers of drafted and accepted tokens."""
    model, found, stats = mlx_mtp.load_model(path, draft_model=drafter, tensor_group=group), {}, mlx_mtp.Stats()
    for kind, options in (("plain", {}), ("seeded", {"temp": 1.0, "seed": 7})):
        found[kind] = generated(model, num_draft_tokens=0, **options)
        for k in (1, 4):
            found[f"{kind} {k}"] = generated(model, num_draft_tokens=k, stats=stats, **options)
    return {"texts": found, "drafted": stats.drafted, "accepted": stats.accepted}


def blocks(path: str, group, drafter: str) -> dict:
    """Return texts with a block drafter, plain, drafted, replayed and seeded; and the drafter's bytes."""
    model = mlx_mtp.load_model(path, tensor_group=group, draft_model=drafter)
    stats, found = mlx_mtp.Stats(), []
    for options in ({}, {"temp": 1.0, "seed": 7}):
        ways = [(k, replay) for k in (0, 3, 15) for replay in (False, True)]
        found.append(
            [generated(model, num_draft_tokens=k, stats=stats, compile_cycles=r, **options) for k, r in ways]
        )
    sizes = [array.nbytes for _, array in tree_flatten(model["drafter"].parameters())]
    return {"texts": found, "bytes": sum(sizes), "accepted": sum(stats.accepted)}


def heads_and_blocks(path: str, group, drafter: str) -> dict:
    """Texts with heads and a block drafter: plain, and by plans of all kinds of drafts; and the drafts by source."""
    model = mlx_mtp.load_model(path, tensor_group=group, draft_model=drafter)
    stats, plain = mlx_mtp.Stats(), generated(model, num_draft_tokens=0)
    plans = [Plan("heads", 3), Plan("block", 4), Plan(), Plan("lookup", 2), Plan("block", 2), Plan("heads", 1)]
    with pytest.MonkeyPatch.context() as patch:
        follow(patch, Listed(plans))
        text = generated(model, num_draft_tokens=4, prompt_lookup=True, stats=stats)
    return {"plain": plain, "text": text, "drafted": dict(stats.drafted_by)}


def branched(path: str, group, k: int = 7) -> dict:
    """Return texts, plain and with random trees, and the number of trees with more than one accepted draft."""
    model, control, found = mlx_mtp.load_model(path, tensor_group=group), TreeScript(1, most=k), {}
    for kind, options in (("plain", {}), ("seeded", {"temp": 1.0, "seed": 7})):
        found[kind] = generated(model, num_draft_tokens=0, **options)
        drafter = TreeDrafts().grow(model, [PROMPT + found[kind]], right=0.8)
        with drafted_by(model, drafter, control):
            for compiled in (False, True):
                drafter.in_step = compiled
                found[f"{kind} {compiled}"] = generated(model, num_draft_tokens=k, compile_cycles=compiled, **options)
    return {"texts": found, "trees": sum(c.plan.tree and c.accepted > 1 for c in control.cycles)}


def refused(path: str, group, ranks: list[int], op: str, how: str, rows: int | None, *, few: bool) -> dict:
    """Decode with all kernels on, of which `ranks` refuse one; return equality of tokens, kernels and warnings."""
    plain = mlx_mtp.load_model(path, tensor_group=group)
    limit, found = plain.max_draft_tokens, {}
    cases = [{"num_draft_tokens": limit, "draft_p_min": 0.3}]
    if not few:
        cases.append({"num_draft_tokens": limit, "temp": 1.0, "seed": 7})
        cases += [{"num_draft_tokens": 0}, {"num_draft_tokens": 1}]
    want = [generated(plain, 10, **options) for options in cases]
    affected = group.rank() in ranks

    def refuses(launched, template):
        return how if affected and launched == op and rows in (None, template.get("ROWS")) else None

    with standing_in(refuses), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options, text in zip(cases, want, strict=True):
            found[str(options)] = generated(switched_on(plain), 10, **options) == text
    return {"same": found, "kernels": plain.report.kernels, "warned": len(caught)}


def pictured(path: str, group, k: int, files: list[str]) -> dict:
    """Return a text after pictures whose features only rank 0 has, and the error of a picture that it lacks.

    Also the `answers_about` pictures in files.
    """
    model = mlx_mtp.load_model(path, tensor_group=group)
    vision = model.runtime.vision = picture_prompts.Vision()
    if group is not None and group.rank():
        vision.features = None  # not called
    parts, more = ([5, 6], picture_prompts.A, [7, 8, 9], picture_prompts.C, [10, 11]), {"num_draft_tokens": k}
    more |= {"adaptive": False, "pictures": [picture_prompts.A, picture_prompts.C], "prefill_step_size": 3}
    steps = mlx_mtp.generate_step(picture_prompts.tokens_of(*parts), model, max_tokens=12, **more)
    text, error = [token for token, *_ in steps], ""
    if group is None or group.rank() == 0:
        vision.known, vision.features = {}, {}.__getitem__
    try:
        list(mlx_mtp.generate_step(picture_prompts.tokens_of(*parts), model, max_tokens=12, **more))
    except (ValueError, KeyError) as e:
        error = str(e)
    return {"text": text, "error": error, "answers": answers_about(path, group, files)}


def answers_about(path: str, group, files: list[str]) -> list[str]:
    """Return texts after pictures, from Python's `images` and from the server; of the latter none above rank 0.

    Only rank 0 has the files and reads the tower. Then the results of `failures`, `cancelled_while_held` and
    `asked_beside_another`.
    """
    from held_pictures import asked_beside_another, cancelled_while_held, failures  # only here is the server needed
    from picture_requests import PATHS, body_of
    from served import serving, settings

    from mlx_mtp.serve.follow import follow
    from mlx_mtp.serve.job import End, RequestFailed
    from mlx_mtp.serve.server import Loaded, shared

    loaded, first = Loaded(*mlx_mtp.load(path, tensor_group=group), {}, {}), group is None or group.rank() == 0
    images = files if first else ["nowhere"] * len(files)
    found = [mlx_mtp.generate(*loaded[:2], "What?", images=images, max_tokens=8, adaptive=False)]
    if not first:
        follow(shared(loaded, settings()))
        assert not loaded.model.vision.is_read
        return found
    pictures = [Path(file).read_bytes() for file in files]
    with serving(lambda: loaded) as client:
        both = [*pictures, "What?"]  # at the second time from the prefix cache
        for parts in (both, ["a", pictures[0]], both):
            body = {**body_of("chat", *parts), "temperature": 0}
            found.append(client.post(PATHS["chat"], json=body).json()["choices"][0]["message"]["content"])
        with pytest.MonkeyPatch.context() as patch:
            found.append([failures(client, patch), cancelled_while_held(client, patch)])
            advanced, events, response = asked_beside_another(client, patch)
            assert not any(isinstance(event, End | RequestFailed) for event in events)
            found.append([advanced, response.json()["choices"][0]["message"]["content"]])
    return found


def of_types(paths: list[str], group, length: int) -> list:
    """Return, for each checkpoint, its refusal, or texts with prompt lookup, and one with wrong drafts."""
    found = []
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = mlx_mtp.load_model(path, tensor_group=group)
        except ValueError as e:
            found.append(str(e))
            continue
        drafts = not model.report.port.startswith("none")
        texts = [runs.drafted(model, prompt, length, prompt_lookup=drafts) for prompt in runs.PROMPTS]
        if drafts:
            texts.append(runs.with_wrong(model, runs.PROMPTS[0] + texts[0], runs.PROMPTS[0], length, 3, 0))
        found.append(texts)
    return found


if __name__ == "__main__":
    group = mx.distributed.init() if "MLX_RANK" in os.environ else None
    calls = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    found = [globals()[function](group=group, **json.loads(options)) for function, options in calls]
    sys.stdout.write(json.dumps(found))
