"""Run whole models with the kernels on: logits of verified rows are those of one-row steps."""

import contextlib
import copy

import block_drafters
import drafters
import families
import mlx.core as mx
import pytest
import tiny
from exact import same_bits
from metal_cases import linux_only
from mlx.utils import tree_unflatten
from plans import Listed, follow
from quantized_models import quantized, save_checkpoints
from stock_ops import stock_ops
from sweep import SWEEP, sampled, sweep
from tree_drafts import TreeDrafts

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.make_cache import make_prompt_cache
from mlx_mtp.decoding import step
from mlx_mtp.layers import blocks
from mlx_mtp.layers.attention import Attention
from mlx_mtp.layers.blocks import block_kind, to_blocks
from mlx_mtp.tuning import kernel_sites, kernel_switch
from mlx_mtp.tuning.kernel_verdict import KernelVerdict
from mlx_mtp.tuning.plan import Plan

pytestmark = linux_only
PROMPT, LENGTH = [1, 2, 3, 4], 6
EVERY = {"verify_attention", "attention_merge", "add_norm", "norm_rope", "verify_head"}
DELTA = {"delta_inputs", "gated_delta_verify", "gated_norm"}
ON = KernelVerdict(True, True, reason="asked for")
OPS = {"step": EVERY | {"moe_route", "moe_glu", "moe_down"}, "hybrid": EVERY | DELTA}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return save_checkpoints(tmp_path_factory.mktemp("quantized"))


@contextlib.contextmanager
def in_place_of_metal(unit: str = "forward"):
    """Run kernels and MLX's operations as on a Mac whose matrix unit adds in this order."""
    with emulator.emulated(emulator.Options(traffic=False, matrix_order=unit)) as launches, stock_ops():
        yield launches


def recorded(model):
    """Return a list that gets (first position, tokens, logits) of each later pass of the target."""
    passes, hidden = [], model.hidden

    def hidden_recorded(tokens, cache):
        if len(tokens) > 1:  # a tree's rows: `paths_of`
            return hidden(tokens, cache)
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


V = 16
DENSE = {
    **drafters.HEADLESS["qwen3"],
    **{"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": V},
}
DRAFTER = {**block_drafters.CONFIG, "hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "vocab_size": V}
PRODUCTS = {"verify_qmm", "verify_glu"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A 4-bit model with a block drafter of 15 drafts, and all kernels on for every row count."""
    path = tmp_path_factory.mktemp("dense")
    directory, _ = families.headless(path / "whole", DENSE)
    weights = quantized(dict(mx.load(str(directory / "model.safetensors"))))
    tiny.save(path / "target", DENSE | {"quantization": {"group_size": 32, "bits": 4}}, weights)
    model = mlx_mtp.load_model(path / "target", draft_model=block_drafters.save(path / "drafter", DRAFTER))
    all_on(model)
    return model


def all_on(model) -> None:
    for site in kernel_sites.place(model):
        site.rows = frozenset(site.every_count)


def text_of(model, k: int, n: int) -> list[int]:
    how = {"prompt_lookup": k > 0, "compile_cycles": False}
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=min(k, model.max_draft_tokens), **how)
    return [token for token, _, _ in steps]


def compare(model, passes, known) -> None:
    """Compare every row of the passes over more than one row behind the prompt with passes over one row."""
    singly = Singly(model)
    for at, fed, rows in (each for each in passes if each[0] >= len(PROMPT) and len(each[1]) > 1):
        for i in range(len(fed)):
            assert same_bits(rows[i : i + 1], singly.logits(tuple(known[:at] + fed[: i + 1]))), (at, fed, i)


def test_fifteen_drafts_keep_the_text_and_the_bits(dense, monkeypatch):
    """Of prompt lookup and of a block drafter: 16 rows, whose rejected ones are compared as well."""
    with in_place_of_metal() as launches:
        passes = recorded(dense)
        text = text_of(dense, 0, 4)
        del passes[:], launches[:]
        plans = [Plan("lookup", 15), Plan("block", 15), Plan("lookup", 8)]
        follow(monkeypatch, Listed(plans[: 3 if SWEEP else 2]))
        assert text_of(dense, 15, 4) == text
        assert (EVERY | PRODUCTS) - {launch.kernel for launch in launches} == set()
        assert [len(fed) for _, fed, _ in passes][1:3] == [16, 16]
        compare(dense, passes[: None if SWEEP else 2], PROMPT + text)


def paths_of(model, monkeypatch):
    """Return a list that gets (first position, tokens [T], parents [T-1], logits [T, V]) of each later tree."""
    found, real = [], step.hidden_of_tree

    def hidden_of_tree(target, layers, tokens, tree):
        at, rows = int(next(c for c in layers if not c.is_state).offset.item()), real(target, layers, tokens, tree)
        found.append((at, tokens[0].tolist(), tree.parents[0].tolist(), model.logits(rows)[0]))
        return rows

    monkeypatch.setattr(step, "hidden_of_tree", hidden_of_tree)
    return found


def compare_paths(model, trees, known) -> None:
    """Compare every row of the trees with passes over one row after the tokens of its path."""
    singly = Singly(model)
    for at, tokens, parents, rows in trees:
        paths = [(tokens[0],)]
        for i, parent in enumerate(parents, 1):
            paths.append((*paths[parent], tokens[i]))
        for i, path in enumerate(paths):
            assert same_bits(rows[i : i + 1], singly.logits((*known[:at], *path))), (at, path)


def keeps_trees(model, monkeypatch, sizes: list[int]):
    """Decode with random trees, and compare each of their rows; return the kernels that were launched."""
    with in_place_of_metal() as launches:
        text = text_of(model, 0, LENGTH)
        del launches[:]
        trees, drafter = paths_of(model, monkeypatch), model.drafter
        model.drafter = TreeDrafts().grow(model, [PROMPT + text])
        follow(monkeypatch, Listed([Plan("heads", k, tree=True) for k in sizes]))
        how = {"prompt_lookup": False, "compile_cycles": False, "num_draft_tokens": 15}
        assert [token for token, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=LENGTH, **how)] == text
        model.drafter = drafter
        compare_paths(model, trees[: None if SWEEP else 2], PROMPT + text)
        return {launch.kernel for launch in launches}


def test_trees_keep_the_text_and_the_bits(dense, monkeypatch):
    assert keeps_trees(dense, monkeypatch, [7, 3]) >= EVERY | PRODUCTS


@sweep
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_trees_of_many_rows_have_the_bits_of_one_row_steps(checkpoints, name, monkeypatch):
    model = mlx_mtp.load_model(checkpoints[name])
    all_on(model)
    assert keeps_trees(model, monkeypatch, [15, 7, 11]) >= EVERY


def to_block_format(model) -> None:
    paths = [path for path, m in model.named_modules() if block_kind(m) and m.weight.shape[-1] % 32 == 0]
    made = [(path, to_blocks(dict(model.named_modules())[path], "iq4_nl")) for path in paths]
    model.update_modules(tree_unflatten(made))


@sweep
def test_packed_formats_keep_the_text_and_the_bits(tmp_path, monkeypatch):
    """Every product, also of a single row, is our kernel's."""
    model = blocks_of(tmp_path)
    all_on(model)
    with in_place_of_metal() as launches:
        monkeypatch.setattr(mx, "quantized_matmul", None)
        monkeypatch.setattr(blocks, "block_product", None)
        passes = recorded(model)
        text = text_of(model, 0, 4)
        assert {"verify_qmm", "verify_glu", "verify_head"} <= {launch.kernel for launch in launches}
        del passes[:]
        follow(monkeypatch, Listed([Plan("lookup", 3), Plan("lookup", 7)]))
        assert text_of(model, 7, 4) == text
        compare(model, passes, PROMPT + text)


@sweep
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_many_rows_have_the_bits_of_one_row_steps(checkpoints, name, monkeypatch):
    """With experts, windows and recurrences, after tapes of 16 rows of which some are accepted."""
    model = mlx_mtp.load_model(checkpoints[name])
    all_on(model)
    with in_place_of_metal() as launches:
        passes = recorded(model)
        text = text_of(model, 0, LENGTH)
        del passes[:], launches[:]
        follow(monkeypatch, Listed([Plan("lookup", n) for n in (15, 12, 8, 10)]))
        assert text_of(model, 15, LENGTH) == text
        assert OPS[name] <= {launch.kernel for launch in launches}
        assert {9, 13, 16} <= {len(fed) for _, fed, _ in passes}
        compare(model, passes, PROMPT + text)


# The layers of the other have tests of their own (tests/layers/test_gated_delta.py).
@sweep  # CI runs it in a section of its own
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_verified_rows_have_the_bits_of_one_row_steps(checkpoints, name, monkeypatch, quick_trials):
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
        assert {len(fed) for at, fed, _ in passes if at >= len(PROMPT) and len(fed) > 1} == {2, 3, 4}
        compare(model, passes, PROMPT + texts[0])
    report = model.report
    assert all("off" not in line for line in report.kernels)
    assert all(line.endswith("at M=5, 6, 7, 8") for line in report.not_exact)


LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
}
MATRICES = {"matrix_qmm", "matrix_glu", "matrix_head"}


def latent(path):
    config = families.FAMILIES["deepseek_v3"].config | LATENT
    _, weights, _ = families.build("deepseek_v3", path / "whole", **LATENT)
    routers = {name: weights.pop(name).astype(mx.bfloat16) for name in [*weights] if "mlp.gate." in name}
    config |= {"quantization": {"group_size": 32, "bits": 4}}
    return mlx_mtp.load_model(tiny.save(path / "latent", config, quantized(weights) | routers))


def unquantized(path):
    directory, _ = families.headless(path / "whole", DENSE)
    return mlx_mtp.load_model(directory, draft_model=block_drafters.save(path / "drafter", DRAFTER))


def blocks_of(path):
    model = unquantized(path)
    to_block_format(model)
    return model


# Models, and their kernels of the lane matrix.
MODELS = {
    "unquantized": (unquantized, {"matrix_qmm", "matrix_head"}),
    "blocks": (blocks_of, MATRICES),
    "latent": (latent, {*MATRICES, "matrix_heads"}),
    "step": (lambda path: mlx_mtp.load_model(save_checkpoints(path)["step"]), MATRICES),
}
UNITS = [*zip(MODELS, ("forward", "pairs", "strides", "wide"), strict=True)]


@pytest.mark.parametrize(("name", "unit"), sampled([("blocks", "pairs")], UNITS))
def test_rows_in_the_lane_matrix_have_the_bits_of_one_row_steps(name, unit, tmp_path, monkeypatch):
    """Of verifies of two to eight rows, whose text is that without drafts."""
    drafts = sampled((4,), range(7, 0, -1))
    (make, ops), length = MODELS[name], len(drafts) + 2
    model = make(tmp_path)
    monkeypatch.setattr(kernel_switch, "decide", lambda trials, **_: {trial.key: ON for trial in trials})
    with in_place_of_metal(unit) as launches:
        lines, not_exact = kernel_switch.switch_on(model, "matrix")
        assert model.runtime.lane == "matrix"
        assert not_exact == (("attention",) if model.drafter else ())  # the drafter's
        assert all(any(line.startswith(op) for line in lines) for op in ops - {"matrix_qmm"})
        passes = recorded(model)
        text = [
            token
            for token, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=len(drafts) + 2, num_draft_tokens=0)
        ]
        del passes[:], launches[:]
        follow(monkeypatch, Listed([Plan("lookup", n) for n in drafts]))
        assert text_of(model, 7, length) == text
        assert ops <= {launch.kernel for launch in launches}
        assert {n + 1 for n in drafts} <= {len(fed) for _, fed, _ in passes}
        compare(model, passes, PROMPT + text)
