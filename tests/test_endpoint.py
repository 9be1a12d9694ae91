"""The endpoint backend against a real HTTP server on this machine."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jetspec.errors import JetspecError
from jetspec.generation import endpoint as endpoint_module
from jetspec.generation.base import GenerationRequest
from jetspec.generation.config import EndpointConfig, RegenerationConfig
from jetspec.generation.endpoint import EndpointBackend
from tests.tiny import EOS, tiny_target

TARGET = tiny_target()


class Server:
    """An OpenAI-compatible server whose answers a test decides.

    `answer` gets the request's body and returns (HTTP status, JSON value or raw bytes).
    """

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: completion([EOS])
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.headers.append(dict(self.headers))
                self._reply(*((200, outer.models) if self.path == "/v1/models" else (404, {})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    outer.running += 1
                    outer.most_running = max(outer.most_running, outer.running)
                answer = outer.answer(body)
                with outer._lock:
                    outer.running -= 1
                self._reply(*answer)

            def _reply(self, status: int, value: Any) -> None:
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client gave up, as some tests want

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


def completion(tokens: list[int], finish: str = "stop", **choice: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"token_ids": tokens, "finish_reason": finish, "text": "", **choice}]}


def backend(url: str, *, settings: dict[str, Any] | None = None, **endpoint: Any) -> Any:
    config = RegenerationConfig(
        backend="endpoint",
        **{"batch_size": 4, "max_new_tokens": 8, **(settings or {})},
        endpoint=EndpointConfig(url=url, **{"timeout_s": 20.0, **endpoint}),
    )
    return EndpointBackend(config, TARGET)


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"r{i}", ({"role": "user", "content": "x" * (i + 1)},), 0, 2**40 + i)
        for i in range(count)
    ]


def test_ids_go_out_and_come_back_unchanged(server: Server) -> None:
    server.answer = lambda body: completion([20 + len(body["prompt"]), EOS])
    results = backend(server.url, settings={"temperature": 0.5, "top_p": 0.8}).generate(requests(6))
    for given, result in zip(requests(6), results, strict=True):
        prompt = TARGET.render(given.messages)
        assert result.input_ids == [*prompt, 20 + len(prompt), EOS]
        assert result.loss_mask == [0] * len(prompt) + [1, 1]
        assert (result.id, result.status) == (given.id, "ok")
    body = min(server.bodies, key=lambda b: len(b["prompt"]))
    assert body["model"] == "tiny" and body["return_token_ids"] is True
    assert body["max_tokens"] == 8 and body["stop_token_ids"] == [EOS]
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.5, 0.8, 0)


def test_a_stop_token_the_server_keeps_is_put_back(server: Server) -> None:
    server.answer = lambda body: completion([20], stop_reason=None)
    (result,) = backend(server.url).generate(requests(1))
    assert result.status == "ok" and result.input_ids[-2:] == [20, EOS]


def test_a_cut_answer_is_truncated(server: Server) -> None:
    server.answer = lambda body: completion([20, 21], "length")
    (result,) = backend(server.url).generate(requests(1))
    assert result.status == "truncated" and sum(result.loss_mask) == 2


def test_a_batch_is_in_flight_at_one_time(server: Server) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)
        return completion([EOS])

    server.answer = slow
    backend(server.url).generate(requests(12))
    assert 2 <= server.most_running <= 4


def test_second_turn_sends_the_first_answers_ids(server: Server) -> None:
    server.answer = lambda body: completion([30, 31, EOS])
    talk = tuple({"role": "user", "content": c} for c in ("hi", "bye"))
    (result,) = backend(server.url).generate([GenerationRequest("r", talk, 0, 1)])
    first, second = (body["prompt"] for body in server.bodies)
    assert second[: len(first) + 3] == [*first, 30, 31, EOS]
    assert result.input_ids[: len(second)] == second and sum(result.loss_mask) == 6


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((500, {"error": "out of\nmemory"}), "HTTP 500"),
        ((400, {"error": "prompt too long"}), "prompt too long"),
        ((200, b"{not json"), "not JSON"),
        ((200, {"choices": []}), "not a completion"),
        ((200, [1, 2]), "not a completion"),
        (completion([20], "abort"), "finish_reason 'abort'"),
        (completion(["x"], "stop"), "not integers"),  # type: ignore[list-item]
    ],
)
def test_one_bad_answer_fails_one_request_with_its_reason(
    server: Server, reply: tuple[int, Any], reason: str
) -> None:
    bad = TARGET.render(requests(2)[1].messages)
    server.answer = lambda body: reply if body["prompt"] == bad else completion([EOS])
    results = backend(server.url).generate(requests(3))
    assert [r.status for r in results] == ["ok", "failed", "ok"]
    assert reason in results[1].error and "\n" not in results[1].error


def test_a_request_without_an_answer_times_out_alone(server: Server) -> None:
    bad = TARGET.render(requests(2)[1].messages)

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"] == bad:
            time.sleep(1.0)
        return completion([EOS])

    server.answer = answer
    results = backend(server.url, timeout_s=0.4).generate(requests(3))
    assert [r.status for r in results] == ["ok", "failed", "ok"]
    assert "no answer within 0.4 s" in results[1].error


def test_a_server_that_fails_every_request_ends_the_run(server: Server) -> None:
    server.answer = lambda body: (500, {"error": "broken"})
    with pytest.raises(JetspecError, match=r"32 requests in a row failed.*HTTP 500.*broken"):
        backend(server.url).generate(requests(60))
    assert len(server.bodies) < 60


def test_failures_between_answers_do_not_end_the_run(server: Server) -> None:
    server.answer = lambda body: (500, {}) if len(body["prompt"]) % 2 else completion([EOS])
    results = backend(server.url, settings={"batch_size": 1}).generate(requests(80))
    assert {r.status for r in results} == {"ok", "failed"}


def test_an_unreachable_server_is_one_line(server: Server) -> None:
    server.stop()
    with pytest.raises(JetspecError, match=r"endpoint.url: http.*cannot be reached") as error:
        backend(server.url)
    assert "\n" not in str(error.value)


def test_a_server_that_goes_away_ends_the_run(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_CONNECT_PAUSES_S", (0.01,))
    client = backend(server.url)
    server.stop()
    with pytest.raises(JetspecError, match="cannot be reached"):
        client.generate(requests(3))


@pytest.mark.parametrize("url", ["localhost:8000", "not a url", ""])
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(JetspecError, match="regeneration.endpoint.url"):
        backend(url)


def test_a_wrong_path_names_the_usual_one(server: Server) -> None:
    with pytest.raises(JetspecError, match="ends in /v1"):
        backend(server.url.removesuffix("/v1"))


@pytest.mark.parametrize("models", [{}, {"data": 3}, [], {"data": [{"name": "x"}]}])
def test_a_list_of_models_that_is_none_is_one_line(server: Server, models: Any) -> None:
    server.models = models
    with pytest.raises(JetspecError, match="no list of models"):
        backend(server.url)


def test_several_models_must_be_chosen_from(server: Server) -> None:
    server.models = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(JetspecError, match=r"endpoint.model: None: .*one, two"):
        backend(server.url)
    with pytest.raises(JetspecError, match=r"endpoint.model: tree: .*one, two"):
        backend(server.url, model="tree")
    backend(server.url, model="two").generate(requests(1))
    assert server.bodies[0]["model"] == "two"


def test_a_server_without_token_ids_is_refused(server: Server) -> None:
    server.answer = lambda body: (200, {"choices": [{"text": "hi", "finish_reason": "stop"}]})
    with pytest.raises(JetspecError, match="no token_ids"):
        backend(server.url).generate(requests(1))


def test_a_server_that_changes_the_prompt_is_refused(server: Server) -> None:
    server.answer = lambda body: completion([EOS], prompt_token_ids=[0, *body["prompt"]])
    with pytest.raises(JetspecError, match="changes the prompt"):
        backend(server.url).generate(requests(1))


def test_the_key_comes_from_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JetspecError, match=r"api_key_env: SOME_KEY: is not set"):
        backend(server.url, api_key_env="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "abc")
    backend(server.url, api_key_env="SOME_KEY")
    assert server.headers[-1]["Authorization"] == "Bearer abc"


def test_a_refused_key_says_where_to_set_it(server: Server) -> None:
    server.answer = lambda body: (401, {"error": "no"})
    with pytest.raises(JetspecError, match=r"refuses the key.*api_key_env"):
        backend(server.url).generate(requests(1))
