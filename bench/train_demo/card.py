"""The model card: the demo's purpose, training and measured figures."""

import platform
from dataclasses import dataclass

MAX_SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class Run:
    """Figures of one training run; losses are nats per token of trunk and depths, at the end."""

    parameters: int
    steps: int
    tokens: int
    seed: int
    minutes: float
    losses: list[float]
    machine: str


def percent(values: list[float]) -> str:
    """[0.5, 0.25] -> "50% / 25%"."""
    return " / ".join(f"{100 * v:.0f}%" for v in values)


def table(report: dict[str, dict]) -> str:
    """One row per evaluation set of `evaluate`."""
    titles = ["text", "tokens", "loss", "trunk top-1", "depths 1 / 2 / 3 top-1", "agree", "drafts in a row"]
    rows = [titles, ["---"] * len(titles)]
    for name, r in report.items():
        first, *others = r["accuracy"]
        cells = [
            name,
            r["tokens"],
            f"{r['loss']:.2f}",
            percent([first]),
            percent(others),
            percent(r["agreement"]),
        ]
        rows.append([*cells, f"{r['run']:.2f}"])
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def model_card(run: Run, report: dict[str, dict], samples: list[tuple[str, str]], variety: list[float]) -> str:
    """README.md of the checkpoint; `variety` is `distinct_share` of each held-out prompt's continuation."""
    varied = sum(share >= 0.4 for share in variety)
    shown = [*samples[:2], *samples[2::6]]  # the two first prompts and a few held-out ones
    blocks = "\n\n".join(f"`{prompt}`\n\n```\n{answer.strip(chr(10))}\n```" for prompt, answer in shown)
    return f"""# mlx_mtp demo: a tiny Step-3.5 with three MTP depths

A {run.parameters / 1e6:.1f}M-parameter model of the Step-3.5 architecture (`step3p5`): full and
sliding attention with different head counts, head-wise gates, two mixture-of-experts layers, and three
chained multi-token-prediction depths, each with its own LM head. The tensors carry the released checkpoints'
names. It exists to try and test exact MTP decoding without a download. It is a demo: it recites parts of
Python's standard library and knows nothing else; what it says about Python can be wrong.

## Training

    python -m bench.train_demo.train --steps {run.steps} --seed {run.seed}

Text: the standard library of Python {platform.python_version()}, nothing else. Docstrings as questions
and answers in the chat template, and source code: first mostly chats, a hundred famous functions again and
again, then mostly code (with the first line of each docstring), then short functions, at last those and what the
trunk itself writes when asked about invented names, where the depths learn to foresee the trunk. Held out for
evaluation: whole modules, and a slice of the docstrings chosen by hash (as chats, and in the source).

{run.steps} steps, {run.tokens / 1e6:.1f}M tokens (several passes), {run.minutes:.0f} minutes on {run.machine}
with the settings in `bench/train_demo/train.py`, fp32, AdamW; weights stored as bf16. Loss over the last steps, in
nats per token, of the trunk against the text and of depths 1 to 3 against the trunk's own choices:
{", ".join(f"{x:.2f}" for x in run.losses)}.

## Figures

Teacher-forced. Top-1 is against the text; "agree" compares the choice of depths 1 / 2 / 3 with the trunk's
own for the same position, and "drafts in a row" is how many depths agree before the first that does not.

{table(report)}

Greedy continuations of {len(variety)} held-out prompts: in {varied} at least 40% of the 8-grams are distinct.

## Samples

Greedy, at most {MAX_SAMPLE_TOKENS} tokens; questions go through the chat template, code does not.

{blocks}

The training text is part of Python and under the Python Software Foundation License.
"""
