"""Tool results find their calls in a time that does not grow with the product of both numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates import OWN, tokenizer_of

from mlx_mtp.serve.forms import Conversation, _with_one_call_a_turn
from mlx_mtp.serve.history import Unanswered, linked
from mlx_mtp.serve.ollama_fields import chat_messages
from mlx_mtp.serve.template_traits import traits_of


class Counted(str):
    """A text that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


MANY = 200
LINKING = {
    "linked": lambda messages: linked(messages, traits_of(tokenizer_of(OWN["json"]))),
    "ollama": lambda messages: linked(chat_messages({"messages": messages}), traits_of(tokenizer_of(OWN["json"]))),
    "one call a turn": lambda messages: _with_one_call_a_turn(Conversation(messages, None)).messages,
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("link", LINKING.values(), ids=LINKING)
def test_results_are_linked_without_comparing_each_with_all_calls(link, known):
    calls = [{"id": Counted(i), "type": "function", "function": {"name": "f", "arguments": {}}} for i in range(MANY)]
    ids = [Counted(i if known else -1) for i in reversed(range(MANY))]
    results = [{"role": "tool", "tool_call_id": id, "content": ""} for id in ids]
    answers = [{"role": "assistant", "content": "", "tool_calls": calls}, *results] * 2
    Counted.compared = 0
    assert len(link([{"role": "user", "content": "a"}, *answers])) >= 2 * MANY
    assert Counted.compared < 20 * MANY


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=8), st.lists(st.integers(0, 3), max_size=12))
def test_calls_are_taken_in_their_order_and_once(keys, takes):
    pending, left = Unanswered[int](), [*enumerate(keys)]
    for call, each in left:
        pending.add(call, *each)
    for key in takes:
        expected = next((found for found in left if key in found[1]), None)
        assert pending.take(key) == (expected and expected[0])
        left = [each for each in left if each is not expected]
