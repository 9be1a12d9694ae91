"""What a stage hands to the next one: ids, URIs, hashes and small figures, never data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StageResult:
    """The record that crosses a task edge.

    Attributes:
        stage: `samples`, `head` or `evaluation`.
        uri: the stage's output directory; complete, since its manifest exists.
        key: hash of everything that shaped the output.
        reused: the directory was already complete, so nothing was computed.
        facts: the figures of the manifest, as small JSON values.
    """

    stage: str
    uri: str
    key: str
    reused: bool
    facts: dict[str, Any] = field(default_factory=dict)
