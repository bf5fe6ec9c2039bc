"""Every function refuses the same values of an option, with a ValueError that names the value and what is allowed."""

import inspect
from functools import partial

import pytest
from letter_chats import make_tokenizer
from sweep import sampled

import mlx_mtp
from mlx_mtp.batch.settings import BatchSettings
from mlx_mtp.checkpoint.load import LOADING
from mlx_mtp.decoding.drafters import GRAMMAR_DRAFTS
from mlx_mtp.decoding.ranges import OPTIONS
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.session import ChatSession

VALUES = {
    "NaN": float("nan"), "infinity": float("inf"), "minus infinity": -float("inf"),
    "true": True, "-2": -2, "2.5": 2.5,
    "huge": 10**400,
    "text": "x", "list": [], "list of texts": ["x"], "dict": {"a": 1}, "object": object(),
}  # fmt: skip
SAMPLING = Sampling.__dataclass_fields__.keys()
# Not in OPTIONS: what each allows of VALUES; the functions check these with the model, the cache or the pictures.
OTHERS = {
    "draft_sampling": (), "temp": ("2.5",), "top_p": (), "top_k": (),
    "min_p": (), "min_tokens_to_keep": (), "xtc_probability": (), "xtc_threshold": (),
}  # fmt: skip
CHECKED_ELSEWHERE = {"prompt_cache", "pictures", "stop_tokens", "prompt", "model", "cache", "chunk", "sampling"}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(vocab_size=16)[0]


def functions_of(model):
    """Return the functions that take options of a generation, by name, each with the options that it lacks."""
    tokenizer, callback = make_tokenizer(), "prompt_progress_callback"
    of_batch = {callback, "logprobs", "prefill_step_size"}
    return {
        "generate_step": (partial(mlx_mtp.generate_step, [1], model), set()),
        "stream_generate": (partial(mlx_mtp.stream_generate, model, tokenizer, [1]), set()),
        "generate": (partial(mlx_mtp.generate, model, tokenizer, [1]), set()),
        "batch_generate": (partial(mlx_mtp.batch_generate, model, tokenizer, [[1]]), of_batch),
        "BatchGenerator": (partial(mlx_mtp.BatchGenerator, model), {callback}),
        "ChatSession": (partial(ChatSession, model, tokenizer), set()),
        "make_prompt_cache": (partial(mlx_mtp.make_prompt_cache, model), {*OPTIONS, *OTHERS} - CACHE),
    }


CACHE = {"kv_bits", "mtp_kv_bits", "kv_group_size", "quantized_kv_start", "max_kv_size", "num_draft_tokens"}
OF_ONE = {  # options of some functions only
    "completion_batch_size": ["BatchGenerator", "batch_generate"], "prefill_batch_size": ["BatchGenerator"],
    "verbose": ["generate", "batch_generate"], "return_prompt_caches": ["batch_generate"],
    "return_token_ids": ["batch_generate"], "return_logprobs": ["batch_generate"],
}  # fmt: skip


def refused(name, value):
    """Return whether no function may take a value of an option."""
    if name in OTHERS:
        return not any(VALUES[key] is value for key in OTHERS[name])
    return not OPTIONS[name].fits(value)


def test_every_option_is_in_a_table():
    of_step = inspect.signature(mlx_mtp.generate_step).parameters.keys()
    of_batch = (
        inspect.signature(BatchSettings).parameters.keys()
        | inspect.signature(mlx_mtp.BatchGenerator).parameters.keys()
    )
    known = OPTIONS.keys() | OTHERS.keys() | CHECKED_ELSEWHERE
    assert of_step - known == set()
    assert of_batch - known - {"max_kv_size", "stream", "options"} == set()
    of_load = inspect.signature(mlx_mtp.load).parameters.keys()
    assert of_load - LOADING.keys() == {"adapter_path", "draft_vocab", "kernels", "wired_limit", "tensor_group"}


@pytest.mark.parametrize(
    "name", sampled(["draft_p_min", "max_tokens", "adaptive", "temp", "seed"], [*OPTIONS, *OTHERS])
)
def test_every_function_refuses_the_same_values_in_the_same_words(model, name):
    for key, value in VALUES.items():
        if not refused(name, value):
            continue
        words = set()
        for function, (call, lacks) in functions_of(model).items():
            is_list = (
                name == "max_tokens" and function == "batch_generate" and hasattr(value, "__len__")
            )  # one per prompt
            if name in lacks or is_list or function not in OF_ONE.get(name, [function]):
                continue
            with pytest.raises(ValueError, match=rf"^{name}=.*(allowed|expected)") as error:
                call(**{name: value})
            words.add(str(error.value))
            assert "\n" not in str(error.value), (function, key)
        assert len(words) == 1, (key, words)


@pytest.mark.parametrize("name", LOADING)
def test_load_refuses_options_of_another_type(name):
    for value in (float("nan"), 3, [], object()):
        for load in (mlx_mtp.load, mlx_mtp.load_model):
            parameters = inspect.signature(load).parameters
            if name in parameters:
                first = {} if name == next(iter(parameters)) else {next(iter(parameters)): "nowhere"}
                with pytest.raises(ValueError, match=f"^{name}=.*: allowed is"):
                    load(**first, **{name: value})


def test_values_at_the_ends_are_taken(model):
    for options in (
        {"draft_p_min": 1.0}, {"draft_p_min": 0}, {"max_tokens": -1}, {"max_tokens": 1}, {"seed": 2**63 - 1},
        {"top_p": 0}, {"top_p": 1}, {"adaptive": False}, {"prompt_lookup": None}, {"kv_group_size": None},
        {"quantized_kv_start": 0}, {"max_context": 1}, {"grammar_drafts": GRAMMAR_DRAFTS},
    ):  # fmt: skip
        mlx_mtp.generate_step([1], model, **{"max_tokens": 0, **options}).close()
        mlx_mtp.BatchGenerator(model, **options).close()
