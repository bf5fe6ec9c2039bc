"""A server checks rows in idle time, after its first request and between others."""

import time

from served import serving

from mlx_mtp.decoding.row_check import RowCheck
from mlx_mtp.serve.server import Loaded


def ask(client):
    message = {"role": "user", "content": "def f(x):"}
    answer = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
    return answer.json()["choices"][0]["message"]["content"]


def test_rows_are_checked_between_requests(load_one_layer, own_cache, monkeypatch):
    monkeypatch.setattr("mlx_mtp.serve.engine.QUIET", 0.001)
    model, tokenizer = load_one_layer()
    model.runtime.rows = 1
    check = model.runtime.row_check = RowCheck(model, {}, [20], True, recalls=False)
    with serving(lambda: Loaded(model, tokenizer, {}, {}), options={"adaptive": False}) as client:
        time.sleep(0.2)
        assert not check.found  # no request yet
        first, until = ask(client), time.monotonic() + 60
        assert model.runtime.rows in (1, None)
        while not check.done and time.monotonic() < until:
            assert ask(client) == first
            time.sleep(0.1)
    assert check.tokens
    assert [finding.passed for finding in check.found.values()] == [16]
    assert model.runtime.rows is None
