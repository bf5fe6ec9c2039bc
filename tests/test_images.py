"""Pictures in Python: `images` of the generating functions, and conversations with pictures."""

import io
import weakref

import mlx.core as mx
import pytest
import seeing
from picture_requests import noise, url_of
from PIL import Image

import mlx_mtp
from mlx_mtp.cache.prompt_prefix import PromptPrefix
from mlx_mtp.pictures.image import open_image
from mlx_mtp.pictures.rows import Picture, pictures_as_json
from mlx_mtp.session import ChatSession

A, B = noise(1), noise(2, 24, 40)
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mlx_mtp.load(seeing.build(tmp_path_factory.mktemp("seeing"))[0])


def picture_of(data):
    return Picture(open_image(data).digest, (1, 2, 2))


def text_of(model, prompt, **options):
    return mlx_mtp.generate(*model, prompt, max_tokens=6, **options)


def forms_of(data, folder):
    """A picture as each kind of source."""
    file = folder / "a.png"
    file.write_bytes(data)
    return {"path": file, "text": str(file), "bytes": data, "url": url_of(data), "PIL": Image.open(io.BytesIO(data))}


def test_every_kind_of_source_is_the_same_picture(model, tmp_path):
    expected = text_of(model, "What?", images=[A])
    assert expected != text_of(model, "What?", images=[B])
    for kind, source in forms_of(A, tmp_path).items():
        assert text_of(model, "What?", images=[source]) == expected, kind
    assert text_of(model, "What?", image=A) == expected
    assert text_of(model, "What?", images=[open_image(A)]) == expected


def test_pictures_come_at_their_marks_or_before_the_text(model):
    assert text_of(model, f"{MARK}{MARK}What?", images=[A, B]) == text_of(model, "What?", images=[A, B])
    assert text_of(model, f"{MARK}What?{MARK}", images=[A, B]) != text_of(model, "What?", images=[A, B])
    ids = model[1].encode(f"a{MARK}b")
    assert text_of(model, ids, images=A) == text_of(model, f"a{MARK}b", images=A)
    assert text_of(model, mx.array(ids), images=A) == text_of(model, ids, images=A)


def test_pictures_without_marks_come_after_the_token_that_begins_texts(tmp_path):
    begins = mlx_mtp.load(seeing.build(tmp_path)[0])
    begins[1]._tokenizer.bos_token = bos = "<|im_start|>"
    for before in (bos, ""):
        expected = text_of(begins, f"{before}{MARK}{MARK}What?", images=[A, B])
        assert text_of(begins, f"{before}What?", images=[A, B]) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        (f"{MARK}a", {"images": [A, B]}, "1 marks of pictures for 2"),
        (f"{MARK}{MARK}a", {"images": [A]}, "2 marks of pictures for 1"),
        ("a", {"images": [A], "image": B}, "not both"),
        ("a", {"image": A, "pictures": [picture_of(B)]}, "not both"),
        ("a", {"images": [A, b"text"]}, "picture 2"),
        ("a", {"images": ["nowhere.png"]}, "no such file"),
        ("a", {"images": ["http://example.org/a.png"]}, "URL"),
        ("a", {"images": [A], "resize_shape": (0, 3)}, "resize_shape"),
        ("a", {"images": [A], "resize_shape": (1, 2, 3)}, "resize_shape"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_at_the_call(model, prompt, options, reason):
    with pytest.raises(ValueError, match=reason):
        mlx_mtp.stream_generate(*model, prompt, **options)


def test_a_model_without_a_tower_says_what_to_do(model, tmp_path):
    blind = mlx_mtp.load(seeing.build(tmp_path)[0], vision=False)
    with pytest.raises(ValueError, match="omit vision=False"):
        text_of(blind, "What?", images=[A])
    with pytest.raises(ValueError, match="omit vision=False"):
        ChatSession(*blind).ask("What?", images=A)


def test_a_resized_picture_fits_the_shape(model):
    rows = {}
    for shape in (None, 16, (80, 16), [8], 80):
        (*_, last) = mlx_mtp.stream_generate(*model, "", max_tokens=1, images=A, resize_shape=shape)
        rows[str(shape)] = last.prompt_tokens - 2
    assert rows == {"None": 15, "16": 2, "(80, 16)": 6, "[8]": 2, "80": 60}


def test_a_batch_gives_each_prompt_its_own_pictures(model):
    prompts, images = ["a", f"b{MARK}", "c"], [[A, B], [B], None]
    found = mlx_mtp.batch_generate(*model, prompts, images=images, max_tokens=6)
    alone = [text_of(model, p, images=i, num_draft_tokens=0) for p, i in zip(prompts, images, strict=True)]
    assert found.texts == alone


@pytest.mark.parametrize("images", [[[A]], [A, A, A], "a.png"])
def test_a_batch_needs_images_for_each_prompt(model, images):
    with pytest.raises(ValueError, match=r"^images.*for each of 2 prompts"):
        mlx_mtp.batch_generate(*model, ["a", "b"], images=images)


def rendered(*messages):
    """The text of a conversation of (text, number of pictures) and answers, ready for the next answer."""
    turns = []
    for i, (text, count) in enumerate(messages):
        turns.append(f"<|im_start|>{'assistant' if i % 2 else 'user'}\n{MARK * count}{text}<|im_end|>\n")
    return "".join(turns) + "<|im_start|>assistant\n"


def answer_of(session, text, images=None):
    return "".join(response.text for response in session.ask(text, images=images))


def test_every_turn_of_a_conversation_is_the_text_of_its_prompt(model):
    session, so_far, pictures = ChatSession(*model, max_tokens=6), [], []
    for text, images in [("What?", [A]), ("And?", None), ("These?", [B, A]), ("Well?", None)]:
        so_far.append((text, len(images or [])))
        pictures += images or []
        expected = text_of(model, rendered(*so_far), images=pictures, num_draft_tokens=0)
        assert answer_of(session, text, images) == expected
        so_far.append((expected, 0))
    assert session.turn.reused > 40


def test_a_taken_back_picture_is_out_of_the_conversation(model):
    session = ChatSession(*model, max_tokens=6)
    first = answer_of(session, "What?", [A])
    (picture,) = session.last_pictures
    length = session.turn.prompt_tokens
    session.take_back()
    assert session.last_pictures == ()
    assert answer_of(session, "What?") == text_of(model, rendered(("What?", 0)))
    assert session.turn.prompt_tokens == length - picture.rows - 2
    session.take_back()
    assert answer_of(session, "What?", [picture]) == first


def test_the_last_pictures_are_without_those_of_a_given_cache(model):
    vision, cache = model[0].vision, mlx_mtp.make_prompt_cache(model[0])
    kept, new = (vision.picture(open_image(data)) for data in (A, B))
    cache.prefix = PromptPrefix("See. ", images=pictures_as_json([kept]))
    session = ChatSession(*model, max_tokens=3, prompt_cache=cache)
    answer_of(session, "What?", [kept])
    assert session.last_pictures == (kept,)
    answer_of(session, "And?", [new])
    assert session.last_pictures == (new,)


def test_a_mark_in_a_message_or_an_answer_is_text(model):
    session = ChatSession(*model, max_tokens=3)
    session.resume([{"role": "user", "content": MARK}, {"role": "assistant", "content": f"see {MARK}"}], 1)
    assert answer_of(session, f"{MARK} and this?", [A])
    assert answer_of(session, "Well?", [B])
    assert session.turn.reused > 10


def test_stored_features_hold_no_image(model):
    vision, image = model[0].vision, open_image(noise(7))
    released, features = weakref.ref(image), vision.features(vision.picture(image))
    assert vision.stored(vision.picture(image)) is features
    del image
    assert released() is None


def test_a_picture_that_was_read_is_neither_encoded_nor_needed_again(model, monkeypatch):
    session, vision = ChatSession(*model, max_tokens=3), model[0].vision
    vision.keep_at_most(0)
    answer_of(session, "What?", [noise(9)])
    monkeypatch.setattr(vision, "stages", lambda picture: pytest.fail("encoded again"))
    answer_of(session, "And?")
    vision.keep_at_most(1 << 28)
