"""What a server of several models states about a model that is not loaded is what a load finds."""

import json
import shutil

import pytest

from mlx_mtp.checkpoint.load import load_tokenizer
from mlx_mtp.checkpoint.stored_template import default_template, stored_template
from mlx_mtp.demo import demo_path
from mlx_mtp.serve.catalog import offers

# What becomes of tokenizer.json; None: it is missing.
TOKENIZERS = {
    "missing": None,
    "empty": b"",
    "cut": (demo_path() / "tokenizer.json").read_bytes()[:5000],
    "of no model": b"{}",
    "a list": b"[]",
    "no JSON": b"version https://git-lfs.github.com/spec/v1\n",
    "deep": b"[" * 100_000,
}


KINDS = [*TOKENIZERS, "a directory", "a dead link"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a whole model, and one for each kind of broken tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("whole", *KINDS):
        (folder / name).mkdir()
        for source in demo_path().iterdir():
            (folder / name / source.name).symlink_to(source)
        file = folder / name / "tokenizer.json"
        if name != "whole":
            file.unlink()
        if name == "a directory":
            file.mkdir()
        elif name == "a dead link":
            file.symlink_to("nowhere")
        elif TOKENIZERS.get(name) is not None:
            file.write_bytes(TOKENIZERS[name])
    return folder


def test_a_model_is_offered_only_if_its_tokenizer_can_be_loaded(folder):
    found = {each.name: each.problem for each in offers([], folder)}
    assert found.keys() == {"whole", *KINDS}
    assert not found["whole"]
    for kind in KINDS:
        with pytest.raises(ValueError, match=kind) as e:
            load_tokenizer(folder / kind)
        for problem in (str(e.value), found[kind]):
            assert "tokenizer" in problem, kind
            assert "\n" not in problem
            assert ": )" not in problem


SETTINGS = json.loads((demo_path() / "tokenizer_config.json").read_text())
CODE = {"auto_map": {"AutoTokenizer": ["tokens.Tokens", None]}, "tokenizer_class": "Tokens"}
# What becomes of a small file of the tokenizer, as an interrupted copy leaves it.
DAMAGED = [
    *(("tokenizer_config.json", content) for content in (b"", b"[]", json.dumps(SETTINGS).encode()[:-9], b"\xff")),
    *(("tokenizer_config.json", {name: 5}) for name in ("eos_token", "pad_token")),
    *(("tokenizer_config.json", more) for more in ({"model_max_length": "x"}, {"eos_token": {"content": "x"}}, CODE)),
    ("special_tokens_map.json", b"{"),
    ("added_tokens.json", b"[1"),
    ("chat_template.jinja", "{{ messages }}".encode("utf-16")),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED, ids=repr)
def test_a_model_whose_small_files_are_damaged_is_not_offered(name, content, tmp_path):
    path = shutil.copytree(demo_path(), tmp_path / "m")
    (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps({**SETTINGS, **content}).encode())
    (found,) = offers([], tmp_path)
    with pytest.raises(ValueError, match="no usable tokenizer") as e:
        load_tokenizer(path)
    assert found.problem == str(e.value)
    assert name in found.problem or content is CODE
    assert "\n" not in found.problem


def test_code_of_a_tokenizer_is_run_only_with_consent(tmp_path):
    path = shutil.copytree(demo_path(), tmp_path / "m")
    (path / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **CODE}))
    (path / "tokens.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\nclass Tokens(PreTrainedTokenizerFast): ...\n"
    )
    assert [bool(offers([], tmp_path, code=code)[0].problem) for code in (False, True)] == [True, False]


TEMPLATE, OTHER = "{{ messages[0].content }}", "{{ 'other' }}"
NAMED = [{"name": "tool_use", "template": OTHER}, {"name": "default", "template": TEMPLATE}]
FORMS = {  # files by name, as text or the entry `chat_template` of a JSON file
    "a text": {"tokenizer_config.json": TEMPLATE},
    "several": {"tokenizer_config.json": NAMED},
    "several, without a default one": {"tokenizer_config.json": NAMED[:1]},
    "a file": {"chat_template.jinja": TEMPLATE},
    "a file and a text": {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": OTHER},
    "none": {"tokenizer_config.json": None},
    "no text": {"tokenizer_config.json": ""},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_stored_template_is_the_one_of_the_tokenizer(form, tmp_path):
    path = shutil.copytree(demo_path(), tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    for name, content in FORMS[form].items():
        if name.endswith(".jinja"):
            (path / name).write_text(content)
        elif content is not None:
            config["chat_template"] = content
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = default_template(load_tokenizer(path).chat_template)
    assert stored_template(path) == expected
    assert expected == ("" if form in ("several, without a default one", "none", "no text") else TEMPLATE)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"chat_template": 5}', b"\xff"])
def test_damaged_files_have_no_template(content, tmp_path):
    for name in ("tokenizer_config.json", "chat_template.json"):
        (tmp_path / name).write_bytes(content)
    assert stored_template(tmp_path) == ""
    (tmp_path / "x.gguf").write_bytes(content)
    assert stored_template(tmp_path / "x.gguf") == ""
