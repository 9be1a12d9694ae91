"""Conversations answered turn by turn over exact token ids, whatever computes the tokens.

The cut rule. An answer that reaches `max_new_tokens` is kept as it is, without a stop token, and
ends its conversation: later user turns would refer to text that is not there. So does an answer
that loops, and a later turn whose context has outgrown `max_prompt_tokens`. The sample then holds
the turns so far, with status `truncated` or `looping`. A first prompt that is too long is
`skipped`, with its length.

Turns are joined by ids. The next prompt is the ids so far plus what the chat template writes
between an answer and the next one; generated text is never tokenised again. A template that
rewrites earlier turns (Qwen3 drops their thinking) makes that impossible: then the next prompt is
the template's own rendering of the conversation, as a server would send it, and only the answers
after it count in the loss mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jetspec.generation.base import (
    Continuation,
    GenerationRequest,
    GenerationResult,
    Message,
    Status,
)
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.loops import is_looping


class Renderer(Protocol):
    """The part of a target that turns messages into ids and back; a `Target` is one."""

    eos_token_ids: frozenset[int]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> list[int]: ...

    def decode_text(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class TokenPrompt:
    """Ids to continue. `seed` decides every draw; the position in the sequence is its counter."""

    ids: list[int]
    seed: int


Take = Callable[[int, Continuation], None]
Complete = Callable[[Sequence[TokenPrompt], Take], None]
"""Continues prompts, and hands over each answer with its prompt's place, once, in any order."""


def in_order(complete: Callable[[Sequence[TokenPrompt]], list[Continuation]]) -> Complete:
    """A `Complete` from a call that returns all answers together, in the order of the prompts."""

    def hand_over(prompts: Sequence[TokenPrompt], take: Take) -> None:
        for place, continuation in enumerate(complete(prompts)):
            take(place, continuation)

    return hand_over


def answer_all(
    complete: Complete,
    renderer: Renderer,
    config: RegenerationConfig,
    requests: Sequence[GenerationRequest],
    *,
    max_prompt_tokens: int,
) -> list[GenerationResult]:
    """Answer every conversation, all of one turn together; results in the order of `requests`."""
    conversations = [_Conversation(r, renderer, config, max_prompt_tokens) for r in requests]
    open_ = [c for c in conversations if c.begin_turn()]
    while open_:
        _answer_turn(complete, open_)
        open_ = [c for c in open_ if c.begin_turn()]
    return [c.result() for c in conversations]


def _answer_turn(complete: Complete, conversations: Sequence["_Conversation"]) -> None:
    """One answer for each; its text is made as it comes, while the others are still written."""
    waiting = dict(enumerate(conversations))
    complete(
        [TokenPrompt(c.ids, c.request.seed) for c in conversations],
        lambda place, continuation: waiting.pop(place).take(continuation),
    )
    if waiting:
        raise ValueError(f"{len(waiting)} of {len(conversations)} prompts were not answered")


class _Conversation:
    """One conversation on its way; finished when `status` is set."""

    def __init__(
        self,
        request: GenerationRequest,
        renderer: Renderer,
        config: RegenerationConfig,
        max_prompt_tokens: int,
    ) -> None:
        self.request = request
        self._renderer = renderer
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens
        self._messages: list[Message] = []
        self.ids: list[int] = []
        self._mask: list[int] = []
        self._status: Status | None = None
        self._error: str | None = None
        try:
            self._turns = user_turns(request.messages, config.turns)
        except ValueError as error:
            self._turns = []
            self._end("failed", str(error))

    def begin_turn(self) -> bool:
        """Lay the next user turn down; False when the conversation is over."""
        if self._status is not None:
            return False
        if not self._turns:
            self._end("ok")
            return False
        turn = self._turns.pop(0)
        try:
            ids, mask = self._prompt(turn)
        except Exception as error:  # a template may raise anything about one prompt's roles
            self._end("failed", f"the chat template refuses it ({_one_line(error)})")
            return False
        if len(ids) > self._max_prompt_tokens:
            reason = f"prompt of {len(ids)} tokens, limit {self._max_prompt_tokens}"
            self._end("truncated" if self._messages else "skipped", reason)
            return False
        self.ids, self._mask = ids, mask
        self._messages += turn
        return True

    def take(self, continuation: Continuation) -> None:
        """Append one answer and decide whether the conversation goes on."""
        if continuation.finish == "error":
            self._end("failed", continuation.error)
            return
        tokens = continuation.tokens
        text_ids = tokens[:-1] if continuation.finish == "stop" else tokens
        self.ids = self.ids + tokens
        self._mask = self._mask + [1] * len(tokens)
        answer = {"role": "assistant", "content": self._renderer.decode_text(text_ids)}
        self._messages.append(answer)
        if is_looping(text_ids, self._config.loop_min_repeats):
            self._end("looping")
        elif continuation.finish == "length":
            self._end("truncated")

    def result(self) -> GenerationResult:
        assert self._status is not None
        kept = self._status in ("ok", "truncated", "looping")
        return GenerationResult(
            id=self.request.id,
            input_ids=self.ids if kept else [],
            loss_mask=self._mask if kept else [],
            messages=tuple(self._messages) if kept else self.request.messages,
            status=self._status,
            error=self._error,
        )

    def _end(self, status: Status, error: str | None = None) -> None:
        self._status, self._error = status, error

    def _prompt(self, turn: list[Message]) -> tuple[list[int], list[int]]:
        """Ids and loss mask up to the answer of `turn`."""
        if self._messages:
            joint = self._between(turn)
            if joint is not None:
                if joint[:1] == self.ids[-1:]:  # the answer already ends with the turn's end
                    joint = joint[1:]
                return self.ids + joint, self._mask + [0] * len(joint)
        ids = self._render(self._messages + turn)
        return ids, [0] * len(ids)

    def _between(self, turn: list[Message]) -> list[int] | None:
        """What the template writes after the last answer, up to the next; None if it rewrites.

        Two stand-in answers that share no token are rendered in place of the real one: the ids
        after them that both renderings share are the template's own.
        """
        *history, _ = self._messages
        prefix = self._render(history)
        first, second = (
            self._render([*history, {"role": "assistant", "content": stand_in}, *turn])
            for stand_in in ("a", "b")
        )
        if first[: len(prefix)] != prefix or second[: len(prefix)] != prefix:
            return None
        shared = 0
        longest = min(len(first), len(second)) - len(prefix)
        while shared < longest and first[-1 - shared] == second[-1 - shared]:
            shared += 1
        if not 0 < shared < longest:
            return None
        return first[-shared:]

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return self._renderer.render(messages, enable_thinking=self._config.enable_thinking)


def user_turns(messages: Sequence[Message], turns: str) -> list[list[Message]]:
    """The messages to lay down before each answer.

    `all`: given assistant turns are dropped and every user turn gets an answer. `last`: everything
    up to the last user turn is context, and it alone gets one.

    Raises:
        ValueError: no user turn, or a role that cannot be answered anew.
    """
    roles = [m["role"] for m in messages]
    if "user" not in roles:
        raise ValueError("no user turn to answer")
    if turns == "last":
        last = len(roles) - 1 - roles[::-1].index("user")
        return [list(messages[: last + 1])]
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"role {message['role']} cannot be answered anew; use turns: last")
        if message["role"] != "assistant":
            groups[-1].append(message)
        if message["role"] == "user":
            groups.append([])
    return groups[:-1]


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
