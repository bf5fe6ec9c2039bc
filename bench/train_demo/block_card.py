"""The model card of the demo's block drafter."""

import platform

from mlx.utils import tree_flatten

from mlx_mtp.layers.block_drafter import BlockNetwork

from .block_network import DRAFTS, LATER, TAPS, WINDOW


def block_card(net: BlockNetwork, steps: int, seed: int, minutes: tuple[float, float], yielded: float) -> str:
    """README.md of the drafter. minutes: of the clock and of the CPUs. yielded: tokens per cycle on held-out text."""
    parameters = sum(value.size for _, value in tree_flatten(net.parameters())) / 1e6
    taps, (clock, cpu) = ", ".join(map(str, TAPS)), minutes
    return f"""# The mlx_mtp demo's block drafter

{parameters:.2f}M parameters: {net.shape}, and a recurrent Markov head, so that each draft depends on the
drafts before it. It reads the demo's residual stream after layers {taps}, of the last {WINDOW} tokens, and uses
the demo's embedding and LM head. Stored in bfloat16, with the tensor names of released drafters.

    mlx-mtp generate --draft-model demo-block -p "What does os.path.join do?"

## Training

    python -m bench.train_demo.block --steps {steps} --seed {seed}

The text is the demo's own, which it writes greedily after questions, code and pieces of code from the standard
library of Python {platform.python_version()}, without the modules and docstrings that are held out. A block follows
each of a few random tokens. The loss is the cross-entropy against the demo's tokens and probabilities, with weight
{LATER}^d for draft d. {steps} steps, and the text for them, took {clock:.0f} minutes on a shared machine, and
{cpu:.0f} minutes of CPU time.

On text that the demo writes about what is held out, a cycle of {DRAFTS} drafts yields {yielded:.2f} tokens.

The training text derives from Python's, which is under the Python Software Foundation License.
"""
