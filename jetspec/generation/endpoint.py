"""The target answers on an OpenAI-compatible server that is already running.

Prompts go out and answers come back as token ids (`/completions` with `return_token_ids`: vLLM
since 0.10.2, SGLang since July 2026), so neither the server's chat template nor a second
tokenisation can change what the sample holds.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from jetspec.errors import JetspecError
from jetspec.generation.base import Continuation, GenerationRequest, GenerationResult, ignore_tokens
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import Renderer, TokenPrompt, answer_all, in_order

_FAILURES_IN_A_ROW = 32  # a server that fails this often without one answer is broken, not unlucky
_CONNECT_PAUSES_S = (0.5, 2.0, 5.0)  # a server that restarts is waited for


class EndpointBackend:
    """Requests to one server, `batch_size` of them at a time.

    Raises:
        JetspecError: the server cannot be reached, refuses the key, or does not serve the model.
    """

    semantics = "endpoint"

    def __init__(self, config: RegenerationConfig, renderer: Renderer) -> None:
        self.on_tokens: Callable[[int], None] = ignore_tokens
        self._config = config
        self._renderer = renderer
        self._url = config.endpoint.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if (variable := config.endpoint.api_key_env) is not None:
            if variable not in os.environ:
                raise JetspecError(
                    "regeneration.endpoint.api_key_env", variable, "is not set in the environment"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[variable]}"
        self._failures = 0
        self._model = self._served_model()
        self._pool = ThreadPoolExecutor(config.batch_size, thread_name_prefix="endpoint")

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        return answer_all(
            in_order(self._complete),
            self._renderer,
            self._config,
            requests,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, prompts: Sequence[TokenPrompt]) -> list[Continuation]:
        futures = [self._pool.submit(self._continue, prompt) for prompt in prompts]
        try:
            return [future.result() for future in futures]
        except JetspecError:
            for future in futures:
                future.cancel()
            raise

    def _continue(self, prompt: TokenPrompt) -> Continuation:
        config = self._config
        body = {
            "model": self._model,
            "prompt": prompt.ids,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": prompt.seed % 2**31,
            "stop_token_ids": sorted(self._renderer.eos_token_ids),
            "return_token_ids": True,
            **config.chosen_sampling(),
        }
        try:
            continuation = self._read(prompt, self._call("/completions", body))
        except _RequestFailed as error:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise self._error(
                    f"{_FAILURES_IN_A_ROW} requests in a row failed, the last with {error}; "
                    "see the server's log"
                ) from error
            return Continuation([], "error", str(error))
        self._failures = 0
        self.on_tokens(len(continuation.tokens))
        return continuation

    def _read(self, prompt: TokenPrompt, answer: Any) -> Continuation:
        """The continuation in a server's answer."""
        try:
            choice = answer["choices"][0]
            finish = choice["finish_reason"]
            tokens = choice.get("token_ids")
            seen = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or prompt.ids
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise _RequestFailed("an answer that is not a completion") from error
        if tokens is None:
            raise self._error("returns no token_ids; serve with vLLM >= 0.10.2 or a recent SGLang")
        if seen != prompt.ids:
            raise self._error("changes the prompt's token ids; serve the same target and tokenizer")
        if not all(isinstance(token, int) for token in tokens):
            raise _RequestFailed("token_ids that are not integers")
        if finish == "length":
            return Continuation(tokens, "length")
        if finish != "stop":
            raise _RequestFailed(f"finish_reason {finish!r}")
        stops = self._renderer.eos_token_ids
        if not tokens or tokens[-1] not in stops:  # some servers keep the stop token to themselves
            stop = choice.get("stop_reason", choice.get("matched_stop"))
            if stop not in stops:
                if len(stops) != 1:
                    raise _RequestFailed("a stop without its token")
                (stop,) = stops
            tokens = [*tokens, stop]
        return Continuation(tokens, "stop")

    def _served_model(self) -> str:
        wanted = self._config.endpoint.model
        try:
            answer = self._call("/models", None)
            served = [str(model["id"]) for model in answer["data"]]
        except (_RequestFailed, TypeError, KeyError) as error:
            raise self._error(f"gives no list of models ({error}); check the URL") from error
        if wanted is None and len(served) == 1:
            return served[0]
        if wanted is None or wanted not in served:
            raise JetspecError(
                "regeneration.endpoint.model",
                wanted,
                f"name one that {self._url} serves: {', '.join(served) or 'none'}",
            )
        return wanted

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        """The parsed answer of one call.

        Raises:
            _RequestFailed: this request was not answered; another may be.
            JetspecError: no request will be.
        """
        data = None if body is None else json.dumps(body).encode()
        for pause in (*_CONNECT_PAUSES_S, None):
            try:
                request = urllib.request.Request(self._url + path, data, self._headers)
                with urllib.request.urlopen(
                    request, timeout=self._config.endpoint.timeout_s
                ) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                raise self._refusal(error) from error
            except TimeoutError as error:
                raise _RequestFailed(
                    f"no answer within {self._config.endpoint.timeout_s:g} s"
                ) from error
            except urllib.error.URLError as error:
                if isinstance(error.reason, TimeoutError):
                    raise _RequestFailed("no connection in time") from error
                if pause is None or body is None:
                    raise self._error(
                        f"cannot be reached ({error.reason}); start the server or correct the URL"
                    ) from error
                time.sleep(pause)
            except (HTTPException, OSError) as error:
                raise _RequestFailed(f"a broken connection ({type(error).__name__})") from error
            except ValueError as error:
                if not self._url.startswith(("http://", "https://")):
                    raise self._error("not a URL; write http://host:port/v1") from error
                raise _RequestFailed("an answer that is not JSON") from error
        raise AssertionError("unreachable")

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = " ".join(error.read(2000).decode(errors="replace").split())[:200]
        except (OSError, HTTPException):
            said = ""
        if error.code in (401, 403):
            return self._error(f"refuses the key (HTTP {error.code}); set endpoint.api_key_env")
        if error.code == 404:
            return self._error(f"HTTP 404 ({said}); the URL of the API mostly ends in /v1")
        return _RequestFailed(f"HTTP {error.code} {said}".strip())

    def _error(self, mend: str) -> JetspecError:
        return JetspecError("regeneration.endpoint.url", self._url, mend)


class _RequestFailed(Exception):
    """One request got no usable answer."""
