"""Convert a checkpoint with its MTP heads, and check that drafting does not change its text.

    python examples/convert_and_prove.py [MODEL NEW_DIRECTORY [BITS]]

MODEL is a directory or a hub name, BITS quantize it (4 or 8). Without arguments the demo is converted, not
quantized. On the command line: `mlx-mtp convert --hf-path MODEL --mlx-path NEW_DIRECTORY -q`, then `mlx-mtp
verify-lossless --model NEW_DIRECTORY`, which also tests sampling and the wiring of the heads, in a minute or more.
"""

import sys
import tempfile
from pathlib import Path

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.lossless.compare import Comparison, Reference, compare, ways
from mlx_mtp.lossless.prompts import NamedPrompt

source, new, bits = (*sys.argv[1:4], *(None,) * (4 - len(sys.argv)))[:3]
new = new or Path(tempfile.mkdtemp()) / "converted"

# The target gets these bits, the heads 8: fewer bits in a head lower the acceptance, and a head is small.
written = mlx_mtp.convert(source or demo_path(), new, quantize=bits is not None, q_bits=bits and int(bits))
print(f"{written.nbytes / 1e6:.1f} MB in {written.path}\n\n{written.report}\n")

model, tokenizer = mlx_mtp.load(written.path)
prompt = NamedPrompt("code", tokenizer.encode("def read_lines(path):"))

# The reference is plain decoding. Where a text differs, both tokens are judged: if they were equally likely up to
# rounding it is a near-tie, which 16 bits allow; anything else is a bug.
reference = Reference(model, prompt, max_tokens=8, stops=tuple(tokenizer.eos_token_ids))
for way in ways(model.max_draft_tokens, adaptive=True, p_min=0.5, lookup=False, compiled=False):
    found = Comparison(way.name)
    compare(reference, way, found)
    print(f"{way.name}: {found.tokens} tokens compared, {len(found.differences)} near-ties")
    if found.diverged:
        sys.exit(f"{way.name}: another text than without drafts")
