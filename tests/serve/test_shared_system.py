"""The prefill of a conversation starts after the system prompt that it shares with an earlier one."""

import families
import pytest
from letter_chats import make_tokenizer
from served import serving

import mlx_mtp
from mlx_mtp.serve.server import Loaded

STEP = 16
SYSTEM = "abcdefghi" * 6  # letters in a vocabulary of 13 tokens


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])  # rows that can be cut anywhere; states that cannot
def test_a_shared_system_prompt_is_prefilled_once(tmp_path, name):
    path, _, _ = families.build(name, tmp_path)
    model = mlx_mtp.load_model(path)
    options = {"num_draft_tokens": 1, "adaptive": False}
    with serving(lambda: Loaded(model, make_tokenizer(), {}, {}), options=options, step=STEP) as client:
        usages = []
        for question in ("ab" * STEP, "cd" * STEP):  # longer than a chunk
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
            usages.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert usages[0] == 0
    assert usages[1] >= len(SYSTEM) // STEP * STEP
