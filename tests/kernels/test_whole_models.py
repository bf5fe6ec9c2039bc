"""Run whole models with the kernels on: logits of verified rows are those of one-row steps."""

import contextlib
import copy

import mlx.core as mx
import pytest
from exact import same_bits
from metal_cases import linux_only
from plans import Listed, follow
from quantized_models import save_checkpoints
from stock_ops import stock_ops
from sweep import sweep

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.prompt_cache import make_prompt_cache
from mlx_mtp.layers.attention import Attention
from mlx_mtp.tuning import ab_test, kernel_sites, kernel_switch
from mlx_mtp.tuning.plan import Plan

pytestmark = linux_only
PROMPT, LENGTH = [1, 2, 3, 4], 6
EVERY = {"verify_attention", "attention_merge", "add_norm", "norm_rope", "verify_head"}
DELTA = {"delta_inputs", "gated_delta_verify", "gated_norm"}
OPS = {"step": EVERY | {"moe_route", "moe_glu", "moe_down"}, "hybrid": EVERY | DELTA}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return save_checkpoints(tmp_path_factory.mktemp("quantized"))


@contextlib.contextmanager
def in_place_of_metal():
    with emulator.emulated(emulator.Options(traffic=False)) as launches, stock_ops():
        yield launches


def recorded(model):
    """Return a list that gets (first position, tokens, logits) of each later pass of the target."""
    passes, hidden = [], model.hidden

    def hidden_recorded(tokens, cache):
        at = int(mx.array(next(c for c in cache if not c.is_state).offset).item())
        rows = hidden(tokens, cache)
        passes.append([at, tokens[0].tolist(), model.logits(rows)[0]])
        return rows

    model.hidden = hidden_recorded
    return passes


class Singly:
    """A model that reads tokens one by one; each prefix is read once."""

    def __init__(self, model):
        self.model, self.read = model, {(): (None, make_prompt_cache(model).layers)}

    def logits(self, tokens: tuple[int, ...]) -> mx.array:
        """Return the logits [1, V] after the last of the tokens."""
        if tokens not in self.read:
            self.logits(tokens[:-1])
            caches = copy.deepcopy(self.read[tokens[:-1]][1])
            self.read[tokens] = self.model.logits(self.model.hidden(mx.array([[tokens[-1]]]), caches))[0], caches
        return self.read[tokens][0]


# The layers of the other have tests of their own (tests/layers/test_gated_delta.py).
@sweep  # CI runs it in a section of its own
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_verified_rows_have_the_bits_of_one_row_steps(checkpoints, name, monkeypatch):
    monkeypatch.setattr(ab_test, "DRAWS", 1)
    monkeypatch.setattr(ab_test, "LAYERS", 1)
    monkeypatch.setattr(kernel_sites, "KV_BITS", ())
    trials = kernel_switch.trials
    monkeypatch.setattr(kernel_switch, "trials", lambda *args: [t for t in trials(*args) if t.rows <= len(PROMPT)])
    monkeypatch.setattr(Attention, "OFFSET", 250)
    monkeypatch.setattr(Attention, "SLOTS", 512)
    with in_place_of_metal() as launches:
        model = mlx_mtp.load_model(checkpoints[name], kernels="exact", lazy=True)
        passes, texts = recorded(model), {}
        for k, plans in {0: [Plan()], 3: [Plan("heads", n) for n in (3, 1, 2)]}.items():
            del launches[:]
            follow(monkeypatch, Listed(plans))
            steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=LENGTH, num_draft_tokens=k)
            texts[k] = [token for token, _, _ in steps]
            assert OPS[name] <= {launch.kernel for launch in launches}
        assert texts[0] == texts[3]
        known, singly = PROMPT + texts[0], Singly(model)
        verifies = [(at, fed, rows) for at, fed, rows in passes if at >= len(PROMPT) and len(fed) > 1]
        assert {len(fed) for _, fed, _ in verifies} == {2, 3, 4}
        for at, fed, rows in verifies:
            for i in range(len(fed)):
                assert same_bits(rows[i : i + 1], singly.logits(tuple(known[:at] + fed[: i + 1]))), (at, fed, i)
    report = model.report
    assert all("off" not in line for line in report.kernels)
    assert all(line.endswith("at M=5, 6, 7, 8") for line in report.not_exact)
