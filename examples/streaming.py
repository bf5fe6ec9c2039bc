"""Print a text while it is generated, then the gain of drafting.

python examples/streaming.py [MODEL]
"""

import sys

import mlx_mtp
from mlx_mtp.demo import demo_path

model, tokenizer = mlx_mtp.load(sys.argv[1] if len(sys.argv) > 1 else demo_path())

# A prompt is text or token ids. A chat template, where the model has one, makes token ids of messages.
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What does os.path.split do?"}], add_generation_prompt=True
)

for response in mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=60):
    print(response.text, end="", flush=True)

# Each response has mlx_lm's fields, and `stats`: the last one's are those of the whole text.
stats = response.stats
print(f"\n\n{response.generation_tokens} tokens, {response.generation_tps:.0f} a second ({response.finish_reason})")
print(f"{stats.cycles} passes of the model: {stats.summary}")
