"""What every generation backend is: conversations in, exact token ids out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Message = dict[str, str]
Status = Literal["ok", "truncated", "looping", "failed", "skipped"]


@dataclass(frozen=True)
class GenerationRequest:
    """One conversation to answer. `seed` is the request's own: it decides every random draw."""

    id: str
    messages: tuple[Message, ...]
    sample_index: int
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """The answered conversation.

    Attributes:
        input_ids: the whole conversation as the target saw and wrote it, never tokenised again.
        loss_mask: 1 where the target wrote the token, 0 elsewhere; as long as `input_ids`.
        messages: the conversation with the target's answers in place.
        error: why it failed or was skipped.
    """

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    messages: tuple[Message, ...]
    status: Status
    error: str | None = None


@dataclass(frozen=True)
class Continuation:
    """What the target wrote after one prompt.

    `tokens` ends with the stop token when `finish` is "stop".
    """

    tokens: list[int]
    finish: Literal["stop", "length", "error"]
    error: str | None = None


def ignore_tokens(written: int) -> None:
    """The listener of a backend whose progress nobody follows."""


class Backend(Protocol):
    """One way to have the target answer.

    Attributes:
        semantics: names what decides the bytes (who computes, in which precision); part of every
            sample's id.
        on_tokens: called with the number of tokens written since the last call.
    """

    semantics: str
    on_tokens: Callable[[int], None]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Answers in the order of `requests`.

        A request that cannot be answered comes back as failed or skipped with its reason.

        Raises:
            JetspecError: nothing can be answered (server unreachable, wrong set-up).
        """
        ...

    def close(self) -> None: ...
