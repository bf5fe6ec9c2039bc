"""Pictures on the command line: --image of the commands, /image of chat, saved conversations and prompts."""

import io
import json

import pytest
import seeing
from command_line import call, one_line_error
from picture_requests import noise
from PIL import Image
from typed_lines import chat_of, typed

import mlx_mtp
from mlx_mtp.cli.chat_commands import completions, named_files
from mlx_mtp.cli.image_options import spread
from mlx_mtp.demo import demo_path
from mlx_mtp.lossless import check, prompts
from mlx_mtp.session import ChatSession

A, B = noise(1), noise(2, 24, 40)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a checkpoint and two pictures."""
    place = tmp_path_factory.mktemp("seeing")
    seeing.build(place / "model")
    (place / "a.png").write_bytes(A)
    (place / "two words.png").write_bytes(B)
    return place


@pytest.fixture(scope="module")
def model(place):
    return mlx_mtp.load(place / "model")


def shown(command, place, *args):
    """Return what a command prints of a model, without notices."""
    result = call(command, "--model", place / "model", "--quiet", *args)
    assert result.returncode == 0, result.stderr
    return result.stdout


def of_session(model, text, *images, system=None):
    session = ChatSession(*model, max_tokens=5, system_prompt=system)
    return "".join(response.text for response in session.ask(text, images=images))


def printable(text):
    return text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--image", "a", "b", "-p", "c"], ["--image", "a", "--image", "b", "-p", "c"]),
        (["--image", "a", "--image", "b", "c"], ["--image", "a", "--image", "b", "--image", "c"]),
        (["--image=a", "b"], ["--image=a", "--image", "b"]),
        (["-p", "c", "--resize-shape", "1", "2"], ["-p", "c", "--resize-shape", "1", "--resize-shape", "2"]),
        (["--image", "-a.png", "-m", "5"], ["--image", "-a.png", "-m", "5"]),
        (["--image", "a", "--", "b"], ["--image", "a", "--", "b"]),
        (["--image"], ["--image"]),
        (["-p", "-", "x"], ["-p", "-", "x"]),
    ],
)
def test_an_option_takes_several_values(args, expected):
    assert spread(args) == expected


def test_generate_reads_pictures_before_the_message(place, model):
    files = place / "a.png", place / "two words.png"
    found = shown("generate", place, "--image", *files, "-p", "What?", "-m", 5)
    assert found == of_session(model, "What?", A, B) + "\n"
    found = shown("generate", place, "--image", files[0], "-p", "What?", "-m", 5, "--system-prompt", "Be brief.")
    assert found == of_session(model, "What?", A, system="Be brief.") + "\n"
    plain = shown("generate", place, "--image", *files, "-p", "What?", "-m", 5, "--ignore-chat-template")
    assert plain == mlx_mtp.generate(*model, "What?", images=[A, B], max_tokens=5) + "\n"


def test_resize_shape_scales_every_picture(place, model):
    found = shown("generate", place, "--image", place / "a.png", "--resize-shape", 80, 16, "-p", "What?", "-m", 5)
    small = Image.open(io.BytesIO(A)).resize((26, 16), Image.Resampling.BICUBIC)
    assert found == of_session(model, "What?", small) + "\n"


def test_a_wrong_picture_is_one_line_before_the_model_is_loaded(place, monkeypatch):
    monkeypatch.setattr("mlx_mtp.checkpoint.load.load", lambda *_, **__: pytest.fail("was loaded"))
    text = place / "a.txt"
    text.write_text("no picture")
    for command in ("generate", "cache-prompt -p x --prompt-cache-file y", "verify-lossless", "bench decode"):
        for wrong in (place / "none.png", text, place, "https://example.org/a.png"):
            error = one_line_error(call(*command.split(), "--image", place / "a.png", wrong), 2)
            assert "picture 2" in error


def test_a_model_without_a_tower_refuses_pictures_in_one_line(place):
    error = one_line_error(call("generate", "--image", place / "a.png", "--model", demo_path(), "-m", 2))
    assert "vision" in error or "pictures" in error
    error = one_line_error(call("generate", "--image", place / "a.png", "--model", place / "model", "--no-vision"))
    assert "--no-vision" in error


def test_a_saved_prompt_needs_its_pictures_no_more(place, model, tmp_path):
    file = tmp_path / "cache.safetensors"
    shown("cache-prompt", place, "--image", place / "a.png", "-p", "See this: ", "--prompt-cache-file", file)
    expected = of_session(model, "See this: what is it?", A)
    again = ["--prompt-cache-file", file, "-p", "what is it?", "-m", 5]
    assert shown("generate", place, *again) == expected + "\n"
    lines = call("chat", "--model", place / "model", "--quiet", "-m", 5, *again[:2], stdin="what is it?\n")
    assert lines.stdout == expected + "\n", lines.stderr
    error = one_line_error(call("generate", "--model", place / "model", "--image", place / "a.png", *again), 2)
    assert "cache-prompt" in error


def test_options_that_have_no_place_for_pictures_refuse_them(place):
    for flag in ("--contexts 64", "--prompts 1", "--grammar builtin", "--categories x"):
        error = one_line_error(call("bench", "decode", "--image", place / "a.png", *flag.split()), 2)
        assert flag.split()[0] in error


def test_verify_lossless_compares_texts_after_pictures(place, model, monkeypatch):
    monkeypatch.setattr(prompts, "BUILT_IN", {"chats": [], "texts": {"prose": "The"}, "document": "Section {}."})
    monkeypatch.setattr(prompts, "NO_WINDOW", 12)
    monkeypatch.setattr(prompts, "SOURCE", 24)
    monkeypatch.setattr(check, "FIT_TOKENS", 2)
    monkeypatch.setattr(check, "SAMPLED_PROMPTS", 1)
    monkeypatch.setattr(check, "PAIRS", check.PAIRS[:2])
    args = ["--image", place / "a.png", place / "two words.png", "-m", 2, "--draws", 20, "--no-diagnose", "--json"]
    args += ["--num-draft-tokens", 1, "--no-prompt-lookup"]
    found = json.loads(call("verify-lossless", "--model", place / "model", "--float32", *args).stdout)
    assert {each["texts"] for each in found["greedy"]} == {len(prompts.built_in(*model, 2)) + 3}
    assert all(not each["differences"] for each in found["greedy"])
    assert found["sees"] == {"sides": {"right": 0, "pairs": 2}}
    assert any("sees 0 of 2 opposite pairs" in text for text in found["broken"])


def test_bench_decode_times_our_loops_after_pictures(place):
    args = ["--image", place / "a.png", place / "two words.png", "--quick", "-m", 3, "--rounds", 1, "--json"]
    found = json.loads(call("bench", "decode", "--model", place / "model", "--drafts", 1, *args).stdout)
    assert {(each["category"], each["contender"]) for each in found["entries"]} == {
        ("pictures", name) for name in ("plain", "k=1", "adaptive")
    }
    assert found["differences"] == []
    assert "no pictures" in found["left_out"]["mlx-lm"]


# Chat


@pytest.fixture
def chat(model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    return chat_of(model, 3)


def pictures_of(chat):
    return [len(message.get("pictures", ())) for message in chat.session.messages]


@pytest.mark.parametrize("wrap", ["{}", "'{}'", '"{}"', "{} ", "escaped"])
def test_a_dropped_path_may_be_quoted_or_escaped(place, wrap):
    file = place / "two words.png"
    name = str(file).replace(" ", "\\ ") if wrap == "escaped" else wrap.format(file)
    assert named_files(name.strip(), "/image") == [file]
    if wrap != "{}" and wrap != "{} ":
        assert named_files(f"{place}/a.png {name}", "/image") == [place / "a.png", file]


def test_a_name_with_a_quote_is_one_file(tmp_path):
    file = tmp_path / "it's.png"
    file.write_bytes(A)
    assert named_files(str(file), "/image") == [file]
    assert named_files("it's.png", "/image")[0].name == "it's.png"


def test_pictures_go_with_the_next_message_only(chat, place, capsys):
    typed(chat, f"/image {place}/a.png")
    typed(chat, f"/image '{place}/two words.png' {place}/a.png")
    assert "3 pictures will go with the next message" in capsys.readouterr().out
    typed(chat, "What?")
    typed(chat, "And?")
    assert pictures_of(chat) == [3, 0, 0, 0]
    typed(chat, f"/image {place}/a.png")
    typed(chat, "/reset")
    typed(chat, "What?")
    assert pictures_of(chat) == [0, 0]


def test_retry_and_edit_keep_the_pictures(chat, place):
    typed(chat, f"/image {place}/a.png")
    typed(chat, "What?")
    first = chat.session.messages
    typed(chat, "/retry")
    assert chat.session.messages == first
    typed(chat, "/edit Which?")
    assert pictures_of(chat) == [1, 0]
    assert chat.session.last_message == "Which?"


def test_a_wrong_picture_leaves_the_conversation_unchanged(chat, place, capsys):
    for argument in ("", str(place), f"{place}/none.png", "http://example.org/a.png"):
        typed(chat, f"/image {argument}")
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert all(line.startswith("error: ") for line in errors)
    runtime = chat.session.model.runtime
    runtime.vision, runtime.blind, vision = None, "no tower for pictures", runtime.vision
    try:
        typed(chat, f"/image {place}/a.png")
    finally:
        runtime.vision, runtime.blind = vision, ""
    assert capsys.readouterr().err == "error: no tower for pictures\n"
    typed(chat, "What?")
    assert pictures_of(chat) == [0, 0]


def test_a_saved_conversation_has_its_pictures(chat, place, tmp_path):
    typed(chat, f"/image {place}/a.png")
    typed(chat, "What?")
    before = chat.session.messages
    typed(chat, f"/save {tmp_path}/talk.json")
    typed(chat, "And?")
    continued = chat.session.messages
    typed(chat, f"/load {tmp_path}/talk.json")
    assert chat.session.messages == before
    typed(chat, "And?")
    assert chat.session.messages == continued
    typed(chat, "/retry")


def test_damaged_pictures_of_a_saved_conversation_are_one_line(chat, place, tmp_path, capsys):
    typed(chat, "What?")
    before = chat.session.messages
    for pictures in ("a", ["a.png"], [5], ["data:image/png;base64,AAAA"], [f"file://{place}/a.png"], [None]):
        file = tmp_path / "talk.json"
        messages = [{"role": "user", "content": "a", "pictures": pictures}, {"role": "assistant", "content": "b"}]
        file.write_text(json.dumps(messages))
        typed(chat, f"/load {file}")
        assert "message 1" in capsys.readouterr().err
        assert chat.session.messages == before
    file.write_text(json.dumps([messages[0] | {"pictures": []}, messages[1] | {"pictures": []}]))
    typed(chat, f"/load {file}")
    assert "message 2" in capsys.readouterr().err


def test_the_completion_of_image_is_a_path():
    assert completions()["/image"] is None
