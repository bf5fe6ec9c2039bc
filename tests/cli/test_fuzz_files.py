"""Damage other files that commands read, at random: a command prints text or one error line and no partial file.

The files are saved prompt caches, draft vocabularies, adapters, drafters, separate heads, benchmark results,
and a config.json for a random model. For files with a checksum some damaged versions have a correct one.
"""

import contextlib
import json
import shutil
import struct

import damage
import drafters
import families
import mlx.core as mx
import pytest
import results
from cache_files import rewritten, sealed
from command_line import call
from fuzzing import Files, assert_orderly, profile, tree, watched
from hypothesis import given
from hypothesis import strategies as st
from portless import ADAPTER

GENERATE = "generate -m 4 -p abcab --verbose False --ignore-chat-template"
COMMANDS = {
    "cache": [f"{GENERATE} --model DIR --prompt-cache-file FILE"],
    "vocab": [f"{GENERATE} --model DIR --draft-vocab FILE"],
    "heads": [f"{GENERATE} --model DIR --mtp-path FILE"],
    "adapter": [f"{GENERATE} --model QWEN --adapter-path FOLDER"],
    "drafter": [f"{GENERATE} --model QWEN --draft-model FOLDER", "inspect FOLDER"],
    "config": ["bench model --quick --config FILE", "bench verify --config FILE --rows 1 --contexts 4 --rounds 1"],
    "decode": ["bench compare FILE FILE", "bench plot FILE --plot NEW.png", "bench model --quick --measured FILE"],
    "verify": ["bench plot FILE --html NEW", "bench model --quick --measured FILE --model GLM-4.5 --html NEW"],
    "profile": ["bench plot FILE --plot NEW.svg", "bench model --quick --measured FILE --model demo --out NEW"],
    "kernels": ["bench plot FILE --plot NEW.png"],
}
CHANGED = ["cut_bytes", "flip_bits", "junk", "odd_file", "header_entry", "tensor_values", "entry"]
QUERY = "model.layers.4.self_attn.q_proj"
MODELS = ("decode", "verify", "profile", "adapter")  # a damaged file may make the usage wrong
CACHE, ADAPTER_OF_QWEN = COMMANDS["cache"][0], COMMANDS["adapter"][0]
CORPUS: list[list] = [  # each with its draws
    ["config", COMMANDS["config"][0], ["entry"], "config.json", "moe_top_k", None],
    ["cache", CACHE, ["entry"], "cache.safetensors", "format", None, True],
    ["cache", CACHE, ["entry"], "cache.safetensors", "quantizing", False, True],
    ["adapter", ADAPTER_OF_QWEN, ["odd_file"], "adapter_config.json", b"->/dev/zero"],
    ["adapter", ADAPTER_OF_QWEN, ["odd_file"], "adapter_config.json", b"|"],
    ["adapter", ADAPTER_OF_QWEN, ["header_entry"], "adapters.safetensors", f"{QUERY}.lora_a", "metadata", 7],
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with two complete checkpoints, one of them without heads."""
    here, made = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("made")
    damage.put(here / "DIR", damage.build("step3p5", made / "step"))
    families.headless(here / "QWEN", {**drafters.GQA, "model_type": "qwen3", "head_dim": 8})
    damage.write_tokenizer(here / "QWEN")
    return here


@pytest.fixture(scope="module")
def whole(here, tmp_path_factory):
    """Return kind -> the undamaged files; a command gets the first of them."""
    made = tmp_path_factory.mktemp("files")
    for command in ("cache-prompt -p abcab --prompt-cache-file", "draft-vocab --size 6 --out"):
        name, *options = command.split()
        assert call(name, "--model", here / "DIR", *options, made / name).returncode == 0
    drafters.save(made / "drafter", drafters.CONFIG, drafters.GQA["hidden_size"])
    lora = {f"{QUERY}.lora_{x}": s for x, s in {"a": (32, 4), "b": (4, 32)}.items()}
    mx.save_safetensors(str(made / "adapters.safetensors"), {name: mx.ones(shape) for name, shape in lora.items()})
    tensors = damage.unpack((here / "DIR" / "model.safetensors").read_bytes())
    heads = {name: t for name, t in tensors.items() if any(f"layers.{i}." in name for i in (4, 5, 6))}
    found = {
        "cache": {"cache.safetensors": (made / "cache-prompt").read_bytes()},
        "vocab": {"vocab.json": (made / "draft-vocab").read_bytes()},
        "heads": {"heads.safetensors": damage.pack(heads)},
        "adapter": {
            "adapters.safetensors": (made / "adapters.safetensors").read_bytes(),
            "adapter_config.json": json.dumps(ADAPTER).encode(),
        },
        "drafter": {file.name: file.read_bytes() for file in sorted((made / "drafter").iterdir(), reverse=True)},
        "config": {"config.json": json.dumps(damage.STEP | {"vocab_size": 256}).encode()},
    }
    for kind in ("decode", "verify", "profile", "kernels"):
        found[kind] = {f"{kind}.json": json.dumps(getattr(results, f"{kind}_result")()).encode()}
    return {kind: Files(files) for kind, files in found.items()}


def entry(draw, files: damage.Files) -> str:
    """Draw an entry of JSON: of a JSON file or a prompt cache's metadata."""
    if not files:
        return "nothing"
    name, printed = draw(st.sampled_from(sorted(files))), []
    try:
        if name == "cache.safetensors":
            files[name] = rewritten(files[name], lambda state: printed.append(damage.change_entry(draw, state)))
        else:
            tree = json.loads(files[name])
            printed.append(damage.change_entry(draw, tree))
            files[name] = json.dumps(tree).encode()
    except (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError):
        return "nothing"
    return f"{name} {printed}"


def run_case(here, whole, directory, draw) -> None:
    """Run one command on one of the files with one or two damages."""
    kind = draw(st.sampled_from(sorted(COMMANDS)))
    files, command = dict(whole[kind]), draw(st.sampled_from(COMMANDS[kind])).split()
    tensors = any(name.endswith(".safetensors") for name in files)
    possible = [c for c in CHANGED if tensors or c not in ("header_entry", "tensor_values")]
    drawn = [
        entry(draw, files) if change == "entry" else damage.KINDS[change](draw, files)
        for change in draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2))
    ]
    folder = damage.put(directory / "files", files)
    file = folder / next(iter(whole[kind]))
    if kind == "cache" and file.is_file() and not file.is_symlink() and draw(st.booleans()):
        reseal(file)
    places = {"FILE": file, "FOLDER": folder, "DIR": here / "DIR", "QWEN": here / "QWEN"}
    before = tree(directory)
    result = watched(directory, [str(places.get(word, word)) for word in command], drawn)
    assert_orderly(result, (0, 1, 2))
    assert result.returncode != 2 or not file.is_file() or kind in MODELS, result.stderr
    made = tree(directory).keys() - before.keys()
    assert not made if result.returncode else made <= {"NEW", "NEW.png", "NEW.svg"}


def reseal(file) -> None:
    """Write a correct checksum if the file has one."""
    with contextlib.suppress(ValueError, OSError, struct.error):
        sealed(file, file.read_bytes())


@profile(14)
@given(data=st.data())
def test_damage_is_one_error_line(here, whole, tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("case")
    run_case(here, whole, directory, data.draw)
    shutil.rmtree(directory)


@pytest.mark.parametrize("draws", CORPUS, ids=str)
def test_earlier_findings(here, whole, tmp_path, draws):
    values = iter(draws)
    run_case(here, whole, tmp_path, lambda strategy: next(values))
