"""A round's way to the device and back: graphs that enqueue it, and where its result arrives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.engine.job import Ints
from jetspec.engine.round import Round, State

SHORTEST_BOUND = 2048  # rows of the smallest context that a graph is captured for


def context_bound(reach: int, max_rows: int) -> int:
    """Rows of the context that a launch for `reach` rows allows: a power of two, or `max_rows`."""
    return min(max_rows, max(SHORTEST_BOUND, 1 << (reach - 1).bit_length()))


class Graphs:
    """CUDA graphs of a round, captured when first needed.

    Attention's grid follows the longest context that a graph allows: one graph for each power of
    two keeps short contexts from paying for long ones.

    Args:
        state: what the round reads and writes; a capture leaves it as it was.
        max_rows: longest sequence.
    """

    def __init__(self, round: Round, state: State, max_rows: int) -> None:
        self._round, self._state, self._max_rows = round, state, max_rows
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}

    def launch(self, reach: int) -> None:
        """Replay the round in which no sequence outgrows `reach` rows."""
        bound = context_bound(reach, self._max_rows)
        self._round.max_context = bound
        if bound not in self._captured:
            self._captured[bound] = self.capture()
        self._captured[bound].replay()

    def prepare(self) -> None:
        """Capture every graph that sequences of up to `max_rows` need."""
        reach = 1
        while (bound := context_bound(reach, self._max_rows)) not in self._captured:
            self._round.max_context = bound
            self._captured[bound] = self.capture()
            reach = bound + 1

    @torch.no_grad()
    def capture(self) -> torch.cuda.CUDAGraph:
        """Compile and capture the round; no sequence notices."""
        state = vars(self._state)
        held = {name: value.clone() for name, value in state.items() if value is not None}
        self._round.run()  # compiles; it writes behind the prefixes only, and the state is restored
        for name, value in held.items():
            getattr(self._state, name).copy_(value)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._round.run()
        return graph


@dataclass(frozen=True)
class Arrival:
    """Where a round's result arrives on the host (see `State.out`), behind it the anchors that it
    began with, and what tells that they have; None where nothing is asynchronous."""

    out: Tensor
    anchors: Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, state: State) -> "Arrival":
        out, anchors = (torch.empty_like(sent, device="cpu") for sent in (state.out, state.anchors))
        if not state.out.is_cuda:
            return cls(out, anchors, None)
        return cls(out.pin_memory(), anchors.pin_memory(), torch.cuda.Event())

    def send_anchors(self, state: State) -> None:
        """Enqueue their copy; before the round, which moves them."""
        self.anchors.copy_(state.anchors, non_blocking=True)

    def send_out(self, state: State) -> None:
        """Enqueue the copy of the result, the last of the round's."""
        self.out.copy_(state.out, non_blocking=True)
        if self.done is not None:
            self.done.record()

    def wait(self) -> tuple[Ints, Ints]:
        """(`out`, `anchors`), once they have arrived."""
        if self.done is not None:
            self.done.synchronize()
        return self.out.numpy(), self.anchors.numpy()
