"""Test `mlx-mtp inspect`: the facts are those of a load, no weights are read, and damage is listed."""

import functools
import http.server
import json
import re
import struct
import threading
import time
from pathlib import Path

import damage
import drafters
import families
import huggingface_hub.constants
import mlx.core as mx
import published
import pytest
import step_checkpoints
import tiny
from command_line import call
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.demo import demo_path


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """kind -> (directory, its files)"""

    def make(kind):
        files = damage.build(kind, tmp_path_factory.mktemp("built"))
        return damage.put(tmp_path_factory.mktemp("whole") / kind, files), files

    return {kind: make(kind) for kind in ("step3p5", "sharded", "plain", "qwen3_5")}


@pytest.fixture(scope="module")
def facts_of(wholes):
    """Return the facts of one of the checkpoints."""
    return functools.cache(lambda kind: inspect_checkpoint(wholes[kind][0]))


@pytest.mark.parametrize("kind", ["step3p5", "sharded", "plain", "qwen3_5"])
@pytest.mark.filterwarnings("ignore")
def test_the_facts_are_a_loads(wholes, facts_of, kind):
    path, files = wholes[kind]
    facts, report = facts_of(kind), mlx_mtp.load_model(path, lazy=True).report
    assert facts.problems == ()
    assert (facts.family, facts.layers, facts.depths) == (report.family, report.layers, report.heads)
    assert (facts.target.loaded, facts.heads.loaded) == (report.target_bytes, report.head_bytes)
    assert facts.target.quantization == report.target_quantization
    assert (facts.heads.quantization or "not quantized") == report.head_quantization
    stored = [damage.unpack(content) for name, content in files.items() if name.endswith(".safetensors")]
    assert facts.target.tensors + facts.heads.tensors == sum(map(len, stored))
    sizes = {"F32": sum(len(data) for file in stored for _, _, data in file.values())}
    assert {"F32": facts.target.types["F32"] + facts.heads.types.get("F32", 0)} == sizes


def test_growth_of_keys_and_values(facts_of):
    """Bytes that 1,000 tokens add: float32 keys and values of every head of each layer without a window."""
    step, glm = (facts_of(kind).memory for kind in ("step3p5", "sharded"))
    a_layer = 2 * 2 * 16 * 4 * 1000
    assert (step.kv, step.head_kv) == (a_layer, 0)
    assert (glm.kv, glm.head_kv) == (3 * a_layer, a_layer)
    assert glm.context == 4096, "what the model was made for"
    assert 0 < glm.least < 10**7 < glm.available


def test_experts_and_quantization_per_part(tmp_path):
    """4-bit experts and target, 8-bit routers, unchanged heads."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "share_expert_dim")
    config = {**step_checkpoints.CONFIG, **dict.fromkeys(sizes, 64)}
    facts = inspect_checkpoint(step_checkpoints.converted(tmp_path, config, tiny.random_weights(config), bits=4))
    assert facts.problems == ()
    assert facts.layout == "converted to MLX, 2 files, heads in model-mtp.safetensors"
    assert facts.experts.quantization == "4-bit affine g32 (9 modules)"
    assert "8-bit affine g64 (3 modules)" in facts.target.quantization
    assert facts.heads.quantization == "not quantized (float32)"
    packed = 3 * 3 * 4 * 64 * 64 // 2  # three layers of three matrices of four experts, two values a byte
    assert facts.experts.types == {"U32": packed, "F32": packed // 2}  # a scale and a bias for 32 values
    assert facts.zero_centred == (False, False)


def test_fp8_is_listed(tmp_path):
    path, weights, _ = families.build("deepseek_v3", tmp_path / "a")
    stored = dict(weights)
    for name in [name for name in weights if ".experts." in name]:
        stored[name] = mx.to_fp8(weights[name])
        stored[f"{name}_scale_inv"] = mx.ones((1, 1))
    path = tiny.save(tmp_path / "b", json.loads((path / "config.json").read_text()), stored)
    experts = inspect_checkpoint(path).experts
    assert list(experts.types) == ["U8", "F32"]  # as MLX writes F8_E4M3
    assert experts.quantization.startswith("8-bit mxfp8 g32")  # but those of down_proj, whose rows have 24 numbers
    assert experts.loaded < 3 * experts.types["U8"]


def test_text_and_json_have_the_same_facts(wholes):
    path, _ = wholes["sharded"]
    text, facts = call("inspect", path), json.loads(call("inspect", "--json", path).stdout)
    rows = dict(re.match(r"(.{10}) (.*)", line).groups() for line in text.stdout.splitlines())
    assert rows["family    "] == f"{facts['family']}, {facts['layers']} layers"
    assert rows["layout    "] == facts["layout"] == "as released, 3 files, heads in mtp.safetensors"
    assert rows["MTP heads "] == "1 found, 1 declared; no tensor missing"
    assert rows["target    "].endswith(facts["target"]["quantization"])
    assert rows["fits      "] == "a context of 4,096 of 4,096 tokens"
    assert (text.returncode, text.stderr, facts["problems"], facts["missing"]) == (0, "", [], [])
    assert "shared_head.head" in " ".join(facts["head_tensors"])


def train_norms(file):
    """Write ones to the heads' norms, which are a hole in the file."""
    with file.open("r+b") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        for name, entry in json.loads(f.read(length)).items():
            if ".layers.46." in name and len(entry["shape"]) == 1:
                f.seek(8 + length + entry["data_offsets"][0])
                f.write(struct.pack("<H", 0x3F80) * entry["shape"][0])


@sweep
@pytest.mark.parametrize("file", ["step-3.5-flash", "glm-4.5-air", "qwen3.5-2b-mlx"])
def test_hundreds_of_gigabytes_are_not_read(tmp_path, file):
    """Sparse files of the published size: reading them would show in time, memory and blocks on disk."""
    found = published.read(next(f for f in published.FILES if f.stem == file))
    published.write(tmp_path, found)
    if file == "glm-4.5-air":  # the others' norms are stored minus one
        train_norms(tmp_path / "model.safetensors")
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    mx.clear_cache()
    mx.reset_peak_memory()
    before, begun = mx.get_active_memory(), time.process_time()
    facts = inspect_checkpoint(tmp_path)
    assert time.process_time() - begun < 15
    assert mx.get_peak_memory() - before < 2e7
    assert facts.problems == ()
    assert sum(facts.target.types.values()) + sum(facts.heads.types.values()) <= size
    assert sum(facts.target.types.values()) > (2e11 if file != "qwen3.5-2b-mlx" else 1e9)
    assert len(facts.head_tensors) == len(found.heads()) == (facts.heads.tensors if facts.depths else 0)
    if facts.memory.least > facts.memory.available:
        assert facts.memory.context == 0


@pytest.mark.parametrize(
    "kind", sampled(["step3p5", "nemotron_h"], ["step3p5", "deepseek_v3", "qwen3_5", "mimo_v2_flash", "nemotron_h"])
)
def test_missing_heads_are_named(tmp_path, kind):
    """All tensors of missing heads are listed, except embeddings and LM heads that may be the target's."""
    if kind == "step3p5":
        config, weights = step_checkpoints.CONFIG, tiny.random_weights(step_checkpoints.CONFIG)
        heads = step_checkpoints.head_names(weights)
    else:
        path, weights, _ = families.build(kind, tmp_path / "whole")
        config, family = json.loads((path / "config.json").read_text()), families.FAMILIES[kind]
        heads = set(family.heads(family.config))
        config = {**config, "num_nextn_predict_layers": 3 if kind == "mimo_v2_flash" else 1}
    path = tiny.save(tmp_path / "apart", config, {n: w for n, w in weights.items() if n not in heads})
    facts = inspect_checkpoint(path)
    named = {re.sub(r"\.experts\.\d+\.", ".experts.*.", n) for n in heads}
    assert set(facts.missing) == {n for n in named if kind == "step3p5" or not re.search(r"embed_tok|_head\.head", n)}
    assert (facts.problems, facts.depths) == ((), 0)
    assert "no MTP heads found" in facts.warnings[0]


def test_every_missing_tensor_is_named(wholes, tmp_path):
    _, files = wholes["sharded"]
    tensors = damage.unpack(files["mtp.safetensors"])
    gone = [
        "model.layers.3.eh_proj.weight",
        "model.layers.3.mlp.experts.1.up_proj.weight",
        "model.layers.3.enorm.weight",
    ]
    changed = {name: tensor for name, tensor in tensors.items() if name not in gone}
    files = {**files, "mtp.safetensors": damage.pack(changed)}
    del files[damage.INDEX]
    result = call("inspect", damage.put(tmp_path / "c", files))
    assert result.returncode == 1
    row = next(line for line in result.stdout.splitlines() if line.startswith("missing"))
    assert {name.strip() for name in row[11:].split(",")} == set(gone)
    assert (
        result.stderr
        == f"error: {tmp_path}/c/mtp.safetensors: tensor {gone[1]} is missing; the rest of its layer needs it\n"
    )


@pytest.mark.parametrize(
    "case", ["a head tensor is misshapen", "an unknown trunk tensor", "a whole depth is missing"]
)
def test_the_problem_is_the_loaders_error(tmp_path, case):
    weights = tiny.random_weights(step_checkpoints.CONFIG)
    step_checkpoints.DAMAGE[case][0](weights)
    path = tiny.save(tmp_path, step_checkpoints.CONFIG, weights)
    facts = inspect_checkpoint(path)
    with pytest.raises(ValueError, match=step_checkpoints.DAMAGE[case][1]) as error:
        mlx_mtp.load_model(path)
    assert facts.problems[0] == str(error.value)
    assert (facts.layers, facts.report, facts.memory, facts.target.loaded) == (4, None, None, None)
    assert facts.target.tensors + facts.heads.tensors == len(weights)


def test_facts_about_broken_files(wholes, facts_of, tmp_path):
    _, files = wholes["sharded"]
    broken = {
        "config": {**files, "config.json": b"{"},
        "sidecar": {**files, "mtp.safetensors": files["mtp.safetensors"][:-1]},
        "shard": {**files, "model-00002-of-00002.safetensors": b""},
        "outside": {**files, damage.INDEX: b'{"weight_map": {"x": "../../x.safetensors"}}'},
        "nothing": {},
    }
    found = {}
    for name, content in broken.items():
        result = call("inspect", "--json", damage.put(tmp_path / name, content))
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        found[name] = json.loads(result.stdout)
        assert result.stderr == f"error: {found[name]['problems'][0]}\n"
    assert [found[n]["family"] for n in found] == [None, "glm4_moe", "glm4_moe", "glm4_moe", None]
    whole = facts_of("sharded")
    assert found["config"]["target"]["tensors"] == whole.target.tensors + whole.heads.tensors
    assert (found["sidecar"]["depths"], found["sidecar"]["target"]["tensors"]) == (0, whole.target.tensors)
    assert 0 < found["shard"]["target"]["tensors"] < whole.target.tensors
    assert "'../../x.safetensors' is not the name of a file inside this directory" in found["outside"]["problems"][0]
    assert found["outside"]["depths"] == 1


def twice(heads):
    """Replace depth 1 by a copy of depth 0."""
    first = {name: w for name, w in heads.items() if ".layers.4." in name}
    heads |= {name.replace(".layers.4.", ".layers.5."): w for name, w in first.items()}


def change(ending, by):
    """Return a function that changes the tensors whose names end in `ending`."""
    return lambda heads: heads.update({name: by(w) for name, w in heads.items() if name.endswith(ending)})


WRONG = {
    "nothing": (lambda heads: None, None),
    "shifted twice": (
        change("norm.weight", lambda w: w + 1),
        "warning .*4 norms of MTP depth 0 .* look shifted twice",
    ),
    "two conventions": (
        change("6.transformer.shared_head.norm.weight", lambda w: w - 1),
        "warning .*depth 2 .* two conventions in one",
    ),
    "one head twice": (twice, "warning .*MTP depths 0 and 1 have the same norms, value for value"),
    "NaN": (
        change("6.hnorm.weight", lambda w: w * mx.nan),
        r"problem .*layers\.6\.hnorm\.weight holds NaN",
    ),
    "a type that MLX does not read": (
        change("6.hnorm.weight", lambda w: w.astype(mx.complex64)),
        r"problem .*layers\.6\.hnorm\.weight has type C64",
    ),
    "zeros": (change("5.enorm.weight", lambda w: w * 0), r"problem .*layers\.5\.enorm\.weight holds only zeros"),
}


@pytest.mark.parametrize("case", WRONG)
def test_subtly_wrong_heads_are_found_by_their_norms(tmp_path, case):
    """The faults are in heads that were shifted as their target was."""
    weights = tiny.random_weights(step_checkpoints.CONFIG)
    path = step_checkpoints.converted(tmp_path, step_checkpoints.CONFIG, weights)
    heads, (plant, message) = dict(mx.load(str(path / "model-mtp.safetensors"))), WRONG[case]
    mx.eval(heads)
    plant(heads)
    mx.save_safetensors(str(path / "model-mtp.safetensors"), heads, {"format": "mlx"})
    result = call("inspect", path)
    assert result.returncode == (case in ("NaN", "zeros", "a type that MLX does not read"))
    lines = [line for line in result.stdout.splitlines() if line.startswith(("warning", "problem"))]
    assert [line for line in lines if message and re.match(message, line)][:1] == lines[:1], lines
    assert bool(lines) == bool(message)
    norms = re.search(r"norms +stored as they are used \(their means: (\d\.\d\d), (\d\.\d\d)\)", result.stdout)
    assert [round(float(mean)) for mean in norms.groups()] == [1, 2 if case == "shifted twice" else 1]


def test_a_drafter_is_no_model(tmp_path):
    path = tiny.save(tmp_path, drafters.CONFIG, drafters.weights(drafters.CONFIG, families.H))
    result = call("inspect", path)
    assert result.returncode == 1
    assert result.stderr == f"error: {path}: a drafter, for --draft-model with its target; not a model\n"


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one repository, the demo, that also lists files other than a checkpoint's."""

    protocol_version = "HTTP/1.1"
    served: list[tuple[str, int]] = []  # noqa: RUF012 - only one server exists

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        content, code, headers = b"", 404, {}
        if self.path.startswith("/api/models/some/demo"):
            names = [*(file.name for file in demo_path().iterdir()), "mtp/../../x.safetensors", "../config.json"]
            files = [{"rfilename": name} for name in names]
            content, code = json.dumps({"id": "some/demo", "sha": "a" * 40, "siblings": files}).encode(), 200
        elif match := re.fullmatch(rf"/some/demo/resolve/{'a' * 40}/([\w.]+)", self.path):
            content, code = (demo_path() / match[1]).read_bytes(), 200
            headers = {"etag": f'"{match[1]}"', "x-repo-commit": "a" * 40}
            if wanted := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
                content, code = content[int(wanted[1]) : int(wanted[2]) + 1], 206
        self.send_response(code)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.served.append((self.path, len(content)))
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        local = f"http://127.0.0.1:{server.server_port}"
        for name, value in (
            ("ENDPOINT", local),
            ("HUGGINGFACE_CO_URL_TEMPLATE", local + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "cache")),
            ("HF_HUB_OFFLINE", False),
        ):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        Hub.served.clear()
        yield
        server.shutdown()


def test_a_repository_is_inspected_without_its_weights(hub, tmp_path):
    result = call("inspect", "--json", "some/demo")
    assert (result.returncode, result.stderr) == (0, "")
    remote, local = json.loads(result.stdout), json.loads(call("inspect", "--json", demo_path()).stdout)
    found_by_values = ("path", "norms", "zero_centred")
    for fact in local.keys() - {*found_by_values, "memory", "report"}:
        assert remote[fact] == local[fact], fact
    assert (remote["path"], remote["norms"], remote["zero_centred"]) == ("some/demo", [], None)
    assert sum(size for _, size in Hub.served) < 200_000 < (demo_path() / "model.safetensors").stat().st_size
    assert not any("x.safetensors" in path or ".." in path for path, _ in Hub.served)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache"]


def test_a_name_that_is_not_on_the_hub_is_refused(hub):
    result = call("inspect", "some/other")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: some/other: no such directory, and no headers from the hub: ")
    assert result.stderr.count("\n") == 1


def test_without_a_network_the_error_names_offline(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for command in (["inspect"], ["generate", "--model"]):
        result = call(*command, "some/other")
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert result.stderr.startswith("error: some/other: no such directory, no whole copy in the download cache, ")
        assert re.search(r"and offline \(.*refused\): connect and try again$", result.stderr)


def test_a_repository_that_was_downloaded_is_read_there(hub, monkeypatch, tmp_path):
    snapshot = tmp_path / "cache" / "models--some--demo" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in demo_path().iterdir():
        (snapshot / file.name).symlink_to(file)
    refs = Path(snapshot.parents[1] / "refs")
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    facts = json.loads(call("inspect", "--json", "some/demo").stdout)
    assert len(facts["norms"]) == 2
    assert not Hub.served
