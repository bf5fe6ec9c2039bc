"""Check the server on two ranks: rank 0 answers, the other follows, and concurrent answers equal single ones."""

import json
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import rank_group
from picture_requests import body_of, noise
from sweep import sweep

from mlx_mtp.serve.follow import as_json, from_json
from mlx_mtp.serve.job import DecodeRequest
from mlx_mtp.serve.token_rules import TokenRules


def reply_of(port: int, i: int, **more) -> str:
    body = {
        "messages": [{"role": "user", "content": f"What does method {i % 3} do?"}],
        "max_tokens": 12 + i,
        "seed": 3,
    }
    body |= {"temperature": 0.7 * (i % 2), "logit_bias": {"5": -10} if i == 2 else None}
    body |= {"guided_regex": "[a-z]{7}" if i == 3 else None, **more}
    with opened(port, body) as answer:
        if more:
            return answer.read(64).decode()  # and then disconnects
        return json.loads(answer.read())["choices"][0]["message"]["content"]


def opened(port: int, body: dict):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=60)


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return json.loads(answer.read())["status"] == "ok"
    except (OSError, ValueError):
        return False


def test_a_request_is_the_same_after_its_transfer():
    request = DecodeRequest(
        [1, 2], (1,), 7, {"temp": 0.5, "seed": 2**62}, {"logit_bias": {5: -1.5}, "repetition_penalty": 1.1}, ("x",)
    )
    rules = TokenRules(min_tokens=2, stop_tokens=(3, 4), bad_words=("no",))
    request = replace(request, rules=rules, continues=True)
    assert from_json(json.loads(json.dumps(as_json(request)))) == request


@sweep
def test_concurrent_answers_equal_single_ones_and_ctrl_c_ends_both_ranks(tmp_path):
    port = rank_group.free_ports(1)[0]
    argv = [sys.executable, "-m", "mlx_mtp", "serve", "--port", str(port), "--quiet"]
    ranks = rank_group.start(2, tmp_path, argv)
    try:
        end = time.monotonic() + 60
        while not ready(port):
            assert time.monotonic() < end
            time.sleep(0.2)
        together = {}
        threads = [threading.Thread(target=lambda i=i: together.__setitem__(i, reply_of(port, i))) for i in range(5)]
        for thread in threads:
            thread.start()
        reply_of(port, 1, stream=True, max_tokens=500)
        for thread in threads:
            thread.join()
        assert together == {i: reply_of(port, i) for i in range(5)}
        assert (together[3].isalpha(), len(together[3])) == (True, 7)
        ranks[0].send_signal(signal.SIGINT)
        found = rank_group.ended(ranks, timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for code, _, _ in found] == [0, 0]
    assert found[1][1:] == ("", "")


@sweep
def test_an_answer_about_pictures_is_that_of_one_process(tmp_path):
    port = rank_group.free_ports(1)[0]
    argv = [sys.executable, "-m", "mlx_mtp", "serve", "--model", "demo-vision", "--port", str(port), "--quiet"]
    bodies = [{**body_of("chat", *parts), "temperature": 0} for parts in ([noise(1), noise(2), "What?"], ["What?"])]
    found = []
    for n in (1, 2):
        ranks = rank_group.start(n, tmp_path, argv)
        try:
            end = time.monotonic() + 60
            while not ready(port):
                assert time.monotonic() < end
                time.sleep(0.2)
            answers = []
            for body in bodies:
                with opened(port, body) as answer:
                    answers.append(json.loads(answer.read())["choices"][0]["message"]["content"])
            found.append(answers)
            ranks[0].send_signal(signal.SIGINT)
            assert [code for code, *_ in rank_group.ended(ranks, timeout=30)] == [0] * n
        finally:
            for rank in ranks:
                rank.kill()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
