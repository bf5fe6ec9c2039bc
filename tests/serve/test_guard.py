"""Requests are rejected by key, Host, Origin, content type and size; errors have the form of their API."""

import json
import logging
import socket
import threading
from types import SimpleNamespace

import pytest
from served import KEY, serving, start
from starlette.testclient import TestClient

from mlx_mtp.decoding.buffer_count import Buffers
from mlx_mtp.layers.runtime import Runtime
from mlx_mtp.serve.app import Service, application
from mlx_mtp.serve.body import DEPTH
from mlx_mtp.serve.engine import JobLimits
from mlx_mtp.serve.guard import Rules
from mlx_mtp.serve.metrics import Metrics
from mlx_mtp.serve.server import Loaded, listening

JSON = {"content-type": "application/json"}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def served(one_layer):
    return one_layer


@pytest.fixture(scope="module")
def closed(served):
    """A second application with an API key for the same engine."""
    rules = Rules("secret", hosts=("mac.local",), origins=("https://chat.example",), body=1000)
    service = Service(served.service.engine, served.service.metrics, rules, info=served.service.info)
    with TestClient(application(service), base_url="http://localhost") as client:
        yield client


def test_keys(closed):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"x-api-key": "é"}):
        assert closed.get("/v1/models", headers={k: v.encode() for k, v in headers.items()}).status_code == 401
    for headers in (KEY, {"Authorization": "bearer secret"}, {"x-api-key": "secret"}):
        assert closed.get("/v1/models", headers=headers).status_code == 200
    assert closed.get("/health").status_code == closed.get("/").status_code == 200
    assert closed.head("/").status_code == 200
    error = closed.post("/v1/messages", json=HI).json()
    assert error["error"]["type"] == "authentication_error"
    assert error["type"] == "error"
    assert closed.post("/v1/chat/completions", json=HI).json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:8080", "127.0.0.1", "[::1]:8080", "mac.local", "192.168.1.7:80")),
        *((host, 403) for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1")),
    ],
)
def test_hosts(closed, host, status):
    assert closed.get("/v1/models", headers={**KEY, "Host": host}).status_code == status


def test_origins(closed):
    foreign = ("https://evil.example", "http://[::1", "null")
    own = ("http://localhost", "https://chat.example")
    for origin, status in (*((each, 403) for each in foreign), *((each, 200) for each in own)):
        found = closed.get("/v1/models", headers={**KEY, "Origin": origin})
        assert found.status_code == status
        allowed = origin if origin == "https://chat.example" else None
        assert found.headers.get("access-control-allow-origin") == allowed
        wanted = {
            "Method": "POST",
            "Headers": "authorization",
            "Private-Network": "true",
        }  # a preflight request, which has no key
        headers = {"Origin": origin, **{f"Access-Control-Request-{name}": value for name, value in wanted.items()}}
        asked = closed.options("/v1/chat/completions", headers=headers)
        assert asked.status_code == (200 if allowed else 400)
        assert asked.headers.get("access-control-allow-origin") == allowed
        assert asked.headers.get("access-control-allow-headers") == "authorization"
        keyless = closed.get("/v1/models", headers={"Origin": origin})
        assert keyless.headers.get("access-control-allow-origin") == allowed


def test_bodies(closed):
    path = "/v1/chat/completions"
    assert closed.post(path, content="{}", headers={**KEY, "content-type": "text/plain"}).status_code == 415
    big = closed.post(path, json={**HI, "user": "x" * 2000}, headers=KEY)
    assert big.status_code == 413
    deep = "[" * (DEPTH + 1) + "]" * (DEPTH + 1)
    for content in ("", "{", "[]", "null", '{"top_p": NaN}', b"\xff\xfe", f'{{"a": {deep}}}', "[" * 900):
        response = closed.post(path, content=content, headers={**KEY, **JSON})
        assert response.status_code == 400, content
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/api/show", "/api/chat"])
@pytest.mark.parametrize(
    ("headers", "status", "names"),
    [
        ({}, 200, ""),
        ({"content-encoding": "identity"}, 200, ""),
        ({"content-encoding": "Identity, identity"}, 200, ""),
        *(({"content-encoding": each}, 415, each) for each in ("gzip", "deflate", "br", "zstd", "x-gzip")),
        ({"content-encoding": "identity, GZIP"}, 415, "GZIP"),
        *(({"content-type": f"application/json; charset={each}"}, 200, "") for each in ("utf-8", "UTF-8", '"utf-8"')),
        ({"content-type": "application/json;charset=us-ascii ; a=b"}, 200, ""),
        *(({"content-type": f"application/json; charset={each}"}, 415, each) for each in ("utf-16", "latin1", "x")),
        ({"content-type": "application/json; a=b; Charset=UTF-16"}, 415, "UTF-16"),
        ({"content-length": "2", "transfer-encoding": "chunked"}, 400, "transfer-encoding"),
    ],
)
def test_forms_of_bodies(served, path, headers, status, names):
    found = served.post(
        path, content=json.dumps({**HI, "model": "demo", "options": {"num_predict": 1}}), headers={**JSON, **headers}
    )
    assert found.status_code == status
    assert names in found.text
    assert (status == 400) == (found.headers.get("connection") == "close")


@pytest.mark.parametrize("key", ["", " ", "schlüssel", "a\n", "a ", "\tb", "é", "\U0001f511", "a\x7f", "a\x00b"])
def test_a_key_that_no_header_can_send_is_refused(key):
    with pytest.raises(ValueError, match=r"^the API key \(--api-key\): allowed is printable ASCII"):
        Rules(key)
    assert Rules("a b~!").key == "a b~!"


def test_all_responses_have_safe_headers(served, closed, monkeypatch):
    found = [served.get(path) for path in ("/", "/page/chat.js", "/health", "/metrics", "/nothing", "/page/none")]
    found += [served.post("/v1/chat/completions", json=body) for body in (HI, {}, {**HI, "stream": True})]
    found += [served.options("/"), closed.get("/v1/models"), served.get("/", headers={"Host": "evil"})]
    wanted = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    found.append(closed.options("/v1/models", headers=wanted))
    monkeypatch.setattr("mlx_mtp.serve.app.run_in_threadpool", None)
    found.append(served.get("/metrics"))
    assert {each.status_code for each in found} == {200, 400, 401, 403, 404, 405, 500}
    for each in found:
        assert each.headers["x-content-type-options"] == "nosniff"
        assert each.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in found[0].headers["content-security-policy"]


@pytest.mark.parametrize(("levels", "message"), [(DEPTH, "messages"), (DEPTH + 1, f"nested deeper than {DEPTH}")])
def test_the_allowed_depth(served, levels, message):
    content = '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    response = served.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_unknown_paths_and_methods(served):
    for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", "/v1/messages", 405), ("PUT", "/", 405)):
        response = served.request(method, path)
        assert response.status_code == status
        assert path in json.dumps(response.json())


def test_paths_below_a_root_path(served):
    """A reverse proxy may strip the prefix or keep it; the request in the banner includes it."""
    rules = Rules("secret", body=1000)
    service = Service(served.service.engine, served.service.metrics, rules, info=served.service.info)
    with TestClient(application(service, "/llm"), base_url="http://localhost") as client:
        for root in ("", "/llm"):
            assert client.get(f"{root}/").status_code == client.get(f"{root}/health").status_code == 200
            assert client.get(f"{root}/v1/models").status_code == 401
            assert client.get(f"{root}/v1/models", headers=KEY).status_code == 200
            assert client.post(f"{root}/v1/messages", json=HI).json()["type"] == "error"
        assert client.get("/llm").headers["content-type"].startswith("text/html")
        for other in ("/llm/llm/health", "/llmhealth", "/other/health"):
            assert client.get(other, headers=KEY).status_code == 404


def test_refused_requests_are_logged(served, closed, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mlx_mtp.serve"), "propagate", True)
    with caplog.at_level(logging.INFO, "mlx_mtp.serve"):
        served.post("/v1/messages", json={**HI, "top_p": 2})
        closed.get("/v1/%1b[31mmodels")
    assert caplog.messages == [
        "/v1/messages 400: top_p=2: allowed is a number from 0 to 1",
        "'/v1/\\x1b[31mmodels 401: the API key is missing or wrong; send it as a bearer token'",
    ]


def test_more_choices_than_the_queue_holds_are_refused_for_good(load_one_layer):
    with serving(lambda: Loaded(*load_one_layer(), {}, {}), JobLimits(active=1, queued=1)) as client:
        refused = client.post("/v1/chat/completions", json={**HI, "n": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_an_address_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"^127.0.0.1:{port}: address already in use; --port N listens on another port$"
        ):
            listening("127.0.0.1", port)


def test_models(served):
    (model,) = served.get("/v1/models").json()["data"]
    assert model["id"] == "demo"
    assert served.get("/v1/models/demo").json() == model
    assert served.get("/v1/models/org%2Fother").status_code == 404
    refused = served.post("/v1/chat/completions", json={**HI, "model": "other" * 1000})
    assert refused.json()["error"]["code"] == "model_not_found"
    assert len(refused.text) < 1000


def test_the_page_loads_nothing_from_other_hosts(served):
    page = served.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_metrics_list_kernels_that_were_refused():
    reasons = {("verify_qmm", "64x32 4-bit g32 float32", rows): "fails with RuntimeError: no" for rows in (5, 6)}
    tree = SimpleNamespace(nbytes=0, chunks=0, buffers=0)
    model = SimpleNamespace(runtime=Runtime(failed=reasons))
    served = SimpleNamespace(model=model, tree=tree, buffers=Buffers())
    shown = Metrics(SimpleNamespace(served=served, running=[], queued=0)).text().decode()
    kernel = 'kernel="verify_qmm 64x32 4-bit g32 float32",reason="fails with RuntimeError: no"'
    assert f"mlx_mtp:kernels_failed{{{kernel}}} 2.0\n" in shown


def test_metrics(served):
    served.post("/v1/chat/completions", json=HI)
    tree, counted = served.service.engine.served.tree, served.service.engine.served.buffers
    text, held = "", None
    while held != tree.buffers:  # the prefill of idle time may store a chunk in between
        held, text = tree.buffers, served.get("/metrics").text
    assert 'mlx_mtp:requests_total{reason="length"}' in text
    assert "mlx_mtp:spec_decode_num_accepted_tokens_per_pos_total" in text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(float(figures["mlx_mtp:prefix_cache_buffers"])) == held
    assert int(float(figures["mlx_mtp:buffers"])) == held + counted.weights + counted.recordings
    assert counted.weights > 0


def test_requests_are_refused_until_the_model_is_loaded():
    go = threading.Event()

    def never():
        go.wait()
        raise ValueError("no such model")

    service, app = start(never)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        assert client.get("/health").status_code == 503
        answer = client.post("/v1/chat/completions", json=HI)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        go.set()
        service.engine.thread.join()
        assert client.get("/health").json()["status"] == "failed"
    assert str(service.engine.error) == "no such model"
