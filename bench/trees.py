"""Count the tokens of a pass that draft trees give, next to those of chains with at most as many rows.

    python -m bench.trees --model smollm2 --prompts 8 --max-tokens 150

An answer is the same with any drafts. So it is written once, by plain decoding, and the drafter then drafts along it,
from the target's rows of the whole answer: the counts are those of decoding, without its passes of the target.
SmolLM2 gets the first test questions of `bench/smollm2_head`, which its head was not trained on; other models get
prompts of `bench/prompts.json`, evenly spread. Every cycle of an answer has the same plan. At a temperature the seed
is 0. The last line is one JSON object.
"""

import json
import statistics
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.cache.step_cache import seek
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.decoding.sampling import Picker, Sampling, random_key
from mlx_mtp.demo import demo_path
from mlx_mtp.training.texts import chat_tokens
from mlx_mtp.tuning.plan import Plan

from .decode import HERE, read_prompts
from .smollm2_head.answers import question
from .smollm2_head.prompts import TEST_QUESTIONS

CHAINS, TREES = "1,2,3,5,7,11,15", "3,7,15"


class Answer(NamedTuple):
    """Tokens of a prompt and its answer, the number of the prompt's, and the target's rows [1, T, H]."""

    tokens: list[int]
    prompt: int
    hidden: mx.array


def answer_of(model: Any, prompt: list[int], **options: Any) -> Answer:
    """Return the answer by plain decoding."""
    steps = mlx_mtp.generate_step(prompt, model, num_draft_tokens=0, **options)
    tokens = [*prompt, *(token for token, *_ in steps)]
    hidden = model.hidden(mx.array([tokens]), mlx_mtp.make_prompt_cache(model).layers)
    mx.eval(hidden)
    return Answer(tokens, len(prompt), hidden)


def tokens_per_pass(model: Any, answer: Answer, plan: Plan, picker: Picker) -> float:
    """Return the tokens of a pass if every cycle of an answer has this plan."""
    drafter: Any = drafter_of(model)
    cache, base, passes = mlx_mtp.make_prompt_cache(model), answer.prompt - 1, 0
    cache.backlog, cache.live = [drafter.pending(answer.hidden[:, :base])], False
    drafter.read(model, cache, answer.tokens, 0, base, step=512)
    rows = mx.array([answer.tokens])
    end, accepted = answer.prompt, 0  # of the rows that the drafter has not read: the last one is at end - 1
    while end < len(answer.tokens):
        seek(cache.layers, mx.array([end]), end)
        seek(cache.heads, mx.array([base]), base)
        run = Run.of(answer.hidden[:, base:end], rows[:, base + 1 : end + 1], mx.array([accepted]), None, None)
        frame = Frame(model, cache, plan, drafter, [Single(picker)], base)
        drafts = drafter.propose(frame, run, plan.k)
        tree = [] if drafts.parents is None else [drafts.parents]
        mx.eval(drafts.tokens, tree, cache.kept, [c.parts for c in cache.heads])
        accepted = kept_of(drafts, answer.tokens[end + 1 :])
        base, end, passes = end, end + accepted + 1, passes + 1
    return (len(answer.tokens) - 1 - answer.prompt) / passes


def kept_of(drafts: Drafts, truth: list[int]) -> int:
    """Return the number of drafts on the longest path that equals the answer's next tokens."""
    tokens: Any = drafts.tokens.tolist()[0]  # type: ignore[union-attr]
    parents: Any = [*range(len(tokens))] if drafts.parents is None else drafts.parents.tolist()[0]
    depths = [0]  # of row 0 and each draft; -1 for a wrong path
    for token, parent in zip(tokens, parents, strict=True):
        depth = depths[parent]
        depths.append(depth + 1 if 0 <= depth < len(truth) and truth[depth] == token else -1)
    return max(depths)


def prompts_of(name: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Return `count` prompts as tokens."""
    if name != "demo":
        return [chat_tokens(tokenizer, [question(each)]) for each in TEST_QUESTIONS[:count]]
    found = [prompt for _, prompt in read_prompts(tokenizer, HERE / "prompts.json")]
    return found[:: max(1, len(found) // count)][:count]


def best_chain(figures: dict[str, list[float]], rows: int) -> list[float]:
    """Return the figures of the chain with the best mean among those of at most `rows` rows."""
    chains = [values for name, values in figures.items() if name.startswith("chain") and _rows(name) <= rows]
    return max(chains, key=statistics.mean)


def _rows(name: str) -> int:
    return int(name.split()[1]) + 1


def table(figures: dict[str, list[float]]) -> Table:
    found = Table("plan", "rows", "tokens a pass", "of the best chain", "worst answer")
    for name, values in figures.items():
        own = [name, str(_rows(name)), f"{statistics.mean(values):.3f}"]
        if name.startswith("tree"):
            chain = best_chain(figures, _rows(name))
            own += [f"{statistics.mean(values) / statistics.mean(chain):.3f}x"]
            own += [f"{min(a / b for a, b in zip(values, chain, strict=True)):.3f}x"]
        found.add_row(*own)
    return found


@click.command()
@click.option("--model", "name", default="smollm2", show_default=True, help="smollm2, demo, or a directory.")
@click.option("--draft-model", help="Instead of the model's heads.")
@click.option("--prompts", default=8, show_default=True)
@click.option("--max-tokens", default=150, show_default=True)
@click.option("--temp", default=0.0, show_default=True)
@click.option("--chains", default=CHAINS, show_default=True, help="Numbers of drafts.")
@click.option("--trees", default=TREES, show_default=True, help="Numbers of nodes.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(
    name: str,
    draft_model: str | None,
    prompts: int,
    max_tokens: int,
    temp: float,
    chains: str,
    trees: str,
    out: Path | None,
) -> None:
    """Compare draft trees with chains by the tokens of a pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, tokenizer = mlx_mtp.load(demo_path() if name == "demo" else name, draft_model=draft_model)
    source = drafter_of(model).source
    plans = {f"chain {k}": Plan(source, int(k)) for k in chains.split(",") if int(k) <= model.max_draft_tokens}
    plans |= {f"tree {k}": Plan(source, int(k), tree=True) for k in trees.split(",")}
    figures: dict[str, list[float]] = {name: [] for name in plans}
    picker = Picker(Sampling(temp), key=random_key(0))
    options: dict[str, Any] = {"max_tokens": max_tokens, "temp": temp, "seed": 0}
    for i, prompt in enumerate(prompts_of(name, tokenizer, prompts)):
        answer = answer_of(model, prompt, stop_tokens=frozenset(tokenizer.eos_token_ids), **options)
        for plan in plans:
            figures[plan].append(tokens_per_pass(model, answer, plans[plan], picker))
        click.echo(f"prompt {i + 1}: {len(answer.tokens) - answer.prompt} tokens", err=True)
    Console(width=100).print(table(figures))
    result = {"model": name, "prompts": prompts, **options, "tokens_per_pass": figures}
    print(line := json.dumps(result))
    if out:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
