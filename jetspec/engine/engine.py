"""The engine's front: the interface of `jetspec.decode.decode`, on paged caches and CUDA graphs.

Slots are filled as sequences finish. The host reads one small tensor a round: the committed tokens.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from jetspec.decode import PHASES, DecodeResult, Sequel, decode
from jetspec.drafters import HeadDrafter
from jetspec.engine.layers import Rows
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.round import Round, State, draft_depth
from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead
from jetspec.sampling import SamplingParams, request_keys, sample
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

PAGE_SIZE = 64
PREFILL_CHUNK = 512


_CHAIN = TreeConfig(builder="chain")
_GREEDY = SamplingParams()


class Engine:
    """Decodes prompts with up to `slots` sequences side by side.

    On a machine without a GPU the same calls run the reference loop.

    Args:
        target, head: None decodes plainly.
        tree: shape of the draft; None is a chain.
        max_rows: longest sequence, prompt and answer and the nodes of a round.
        exact: bitwise mode: a row's bits do not depend on what shares its pass.
        graphs: capture the round as a CUDA graph; None does so on a GPU.
        kernels: run the kernels even without a GPU (Triton's interpreter, for tests).
    """

    def __init__(
        self, target: Target, head: ParallelHead | None = None, *,
        tree: TreeConfig = _CHAIN, slots: int = 16, max_rows: int = 4096,
        sampling: SamplingParams = _GREEDY, exact: bool = False,
        graphs: bool | None = None, kernels: bool | None = None, page_size: int = PAGE_SIZE,
        forced: bool = False,
    ) -> None:  # fmt: skip
        on_gpu = target.device.type == "cuda"
        self.target, self.head, self.tree, self.sampling = target, head, tree, sampling
        self.kernels = on_gpu if kernels is None else kernels
        self.slots = slots
        if not self.kernels:
            return
        if tree.builder == "algorithm1":
            raise JetspecError("tree.builder", "algorithm1", "the engine builds chain, best_first")
        self.model = EngineModel(target, max_rows=max_rows, exact=exact)
        engine_head = EngineHead(head, max_rows=max_rows, exact=exact) if head else None
        self.cache: PagedCache = self.model.new_cache(slots, max_rows, page_size)
        depth = draft_depth(engine_head, tree)
        self.state = State.idle(slots, depth, target.device, forced)
        self.round = Round(
            self.model, engine_head, tree, sampling, self.cache, self.state, max_rows
        )
        self.rows_left = max_rows - self.round.nodes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphs = on_gpu if graphs is None else graphs

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_token_ids: Collection[int] | None = None,
        request_ids: Sequence[int | str] | None = None,
    ) -> DecodeResult:
        """As `jetspec.decode.decode`; prompts wait for a slot and for pages.

        Raises:
            JetspecError: an empty prompt, or one that cannot fit `max_rows`.
        """
        if not self.kernels:
            drafter = None
            if self.head is not None:
                drafter = HeadDrafter(
                    self.head, self.target, width=self.tree.width, depth=self.tree.depth
                )
            return decode(
                self.target, prompts, drafter=drafter, tree=self.tree, sampling=self.sampling,
                max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids,
                request_ids=request_ids,
            )  # fmt: skip
        stops = frozenset(self.target.eos_token_ids if stop_token_ids is None else stop_token_ids)
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise JetspecError(f"prompts[{index}]", "empty", "give at least one token")
            if len(prompt) + max_new_tokens > self.rows_left:
                raise JetspecError(
                    f"prompts[{index}]", f"{len(prompt)} + {max_new_tokens} tokens",
                    f"the engine holds {self.rows_left} a sequence; raise max_rows",
                )  # fmt: skip
        keys = request_keys(
            range(len(prompts)) if request_ids is None else request_ids, self.target.device
        )
        sequels = [Sequel(list(prompt)) for prompt in prompts]
        waiting = deque(range(len(prompts)))
        running: dict[int, Sequel] = {}
        seconds = dict.fromkeys(PHASES, 0.0)
        while waiting or running:
            started = time.perf_counter()
            for slot in range(self.slots):
                if not waiting:
                    break
                if slot in running:
                    continue
                sequel = sequels[waiting[0]]
                if running and not self.cache.fits(len(sequel.history) + self.round.nodes):
                    break
                self._admit(slot, sequel, keys[waiting.popleft()])
                sequel.extend([int(self.state.anchors[slot])], stops, max_new_tokens)
                running[slot] = sequel
                if sequel.generation.finish:
                    self._release(slot, running)
            seconds["prefill"] += time.perf_counter() - started
            if not running:
                continue
            started = time.perf_counter()
            self._step(running, stops, max_new_tokens)
            seconds["verify"] += time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return DecodeResult([s.generation for s in sequels], seconds, peak)

    def _step(self, running: dict[int, Sequel], stops: frozenset[int], limit: int) -> None:
        """One round, and what it committed."""
        for slot, sequel in running.items():
            self.cache.resize(slot, len(sequel.history) - 1 + self.round.nodes)
        self.cache.upload()
        self.launch()
        tokens, lengths = self.state.tokens.tolist(), self.state.lengths.tolist()
        for slot, sequel in list(running.items()):
            kept = sequel.extend(tokens[slot][: lengths[slot]], stops, limit)
            sequel.generation.rounds.append(kept)
            sequel.generation.accepted.append(lengths[slot] - 1)
            if sequel.generation.finish:
                self._release(slot, running)

    @torch.no_grad()
    def launch(self) -> None:
        """Run one round: replay its graph, capturing it the first time."""
        if not self._graphs:
            self.round.run()
            return
        if self._graph is None:
            state = vars(self.state)
            held = {name: value.clone() for name, value in state.items() if value is not None}
            self.round.run()  # compiles; its effects are undone below
            self._restore(held)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.round.run()
            self._restore(held)
        self._graph.replay()

    def _restore(self, held: dict[str, Tensor]) -> None:
        for name, value in held.items():
            getattr(self.state, name).copy_(value)

    @torch.no_grad()
    def _admit(self, slot: int, sequel: Sequel, key: Tensor) -> None:
        """Read a prompt in chunks into a slot, and sample its first anchor."""
        prompt, device = sequel.history, self.target.device
        self.cache.resize(slot, len(prompt) + self.round.nodes)
        self.cache.upload()
        ids = torch.tensor(prompt, device=device)
        table = self.cache.table[slot : slot + 1]
        hidden = None
        for first in range(0, len(prompt), PREFILL_CHUNK):
            chunk = ids[first : first + PREFILL_CHUNK]
            positions = torch.arange(first, first + len(chunk), device=device, dtype=torch.int32)
            page = table[0, (positions // self.cache.page_size).long()].long()
            cache_rows = page * self.cache.page_size + positions % self.cache.page_size
            one = torch.ones(1, dtype=torch.int32, device=device)
            rows = Rows(
                1, len(chunk), positions, cache_rows, table, one * first, one * len(chunk), None,
                first + len(chunk),
            )  # fmt: skip
            hidden, taps = self.model.forward(chunk, rows, self.cache, self.round.taps)
            if self.round.head and self.round.head_cache and taps is not None:
                self.round.head.extend(taps, positions, cache_rows, self.round.head_cache)
        assert hidden is not None
        place = torch.tensor([len(prompt)], device=device)
        logits = self.model.logits(hidden[-1:].contiguous())
        state = self.state
        state.anchors[slot] = sample(logits.float(), self.sampling, key[None], place)[0]
        state.prefix[slot], state.active[slot], state.keys[slot] = len(prompt), 1, key

    def _release(self, slot: int, running: dict[int, Sequel]) -> None:
        del running[slot]
        self.cache.resize(slot, 0)
        self.state.active[slot] = 0
        self.state.prefix[slot] = 0
