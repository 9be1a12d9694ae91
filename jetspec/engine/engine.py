"""The engine's front: the interface of `jetspec.decode.decode`, on paged caches and CUDA graphs.

Slots are filled as sequences finish. The host reads one small tensor a round, the committed
tokens, and on a GPU it does so while the next round runs: a round needs nothing from the host.
A stop found that way costs one discarded round of its slot. Prompts are read in between without
waiting either: their first tokens arrive with the next round's.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from jetspec.decode import PHASES, DecodeResult, Generation, decode
from jetspec.drafters import Drafter, HeadDrafter, LookupDrafter
from jetspec.engine.job import Ints, Job
from jetspec.engine.launches import Arrival, Graphs, context_bound
from jetspec.engine.layers import Products
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.parallel import Ranks, split_target
from jetspec.engine.prefill import (
    PREFILL_CHUNK,
    Stopwatch,
    keep_texts,
    read_prompts,
    to_device,
)
from jetspec.engine.round import Round, State, draft_depth
from jetspec.errors import JetspecError
from jetspec.heads.config import DraftWeights
from jetspec.heads.eight_bits import drafting_head
from jetspec.heads.parallel import ParallelHead
from jetspec.sampling import SamplingParams, request_keys, sample
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig
from kernels.exact_attention import TAIL
from kernels.tree_build import LARGEST_BUDGET

PAGE_SIZE = 64
PREFILL_ROWS = 8192  # rows of one pass, padding included
ADMITTED_SHARE = 32  # while others run, prompts are read for at least this part of the slots

_CHAIN = TreeConfig(builder="chain")
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Flight:
    """A round that was enqueued: `Job.prompt` and `Job.fresh` of then, and where it arrives."""

    took_part: Ints
    fresh: list[int]
    arrival: Arrival


@dataclass(frozen=True)
class Shared:
    """What engines of one target may have in common, so long as one decodes at a time.

    A target is fused once: fusing it again would leave earlier engines with copies of their own.
    """

    model: EngineModel
    head: EngineHead | None
    cache: PagedCache


class Engine:
    """Decodes prompts with up to `slots` sequences side by side.

    On a machine without a GPU the same calls run the reference loop.

    Args:
        target: shares its weights with the engine.
        head: what drafts: a head, which shares its weights too; a `LookupDrafter`, whose chains
            are copied on the device; None decodes plainly.
        tree: shape of the draft; None is a chain.
        max_rows: longest sequence: prompt, answer and the nodes of the rounds under way.
        pages: pages of keys and values; None is enough for every slot at its longest.
        exact: bitwise mode: a row's bits depend on its own sequence alone, so plain, chain and
            tree decoding give equal tokens at every batch. The head's own passes stay fast: a
            draft decides how much is accepted, never what.
        products: which matrix products run; None follows `exact`.
        draft_weights: `fp8` drafts with weights in eight bits: other drafts, the same text.
        graphs: capture the round as a CUDA graph; None does so on a GPU.
        ahead: rounds enqueued before the oldest is read; None is 1 on a GPU.
        kernels: run the kernels even without a GPU (Triton's interpreter, for tests).
        forced: commit path lengths that `state.forced` holds (for timing with random weights).
        ranks: the processes that hold the target together (`jetspec.engine.parallel`); each makes
            the same engine and the same calls.
        shared: weights and pages to use, made for the same slots, rows, pages and products.

    Raises:
        JetspecError: a target, head or tree that the engine does not run.
    """

    def __init__(
        self, target: Target, head: ParallelHead | LookupDrafter | None = None, *,
        tree: TreeConfig = _CHAIN, slots: int = 16, max_rows: int = 4096,
        pages: int | None = None, sampling: SamplingParams = _GREEDY, exact: bool = False,
        products: Products | None = None, draft_weights: DraftWeights = "own",
        graphs: bool | None = None, ahead: int | None = None,
        kernels: bool | None = None, page_size: int = PAGE_SIZE, forced: bool = False,
        ranks: Ranks = Ranks(), shared: Shared | None = None,
    ) -> None:  # fmt: skip
        on_gpu = target.device.type == "cuda"
        self.lookup = lookup = head if isinstance(head, LookupDrafter) else None
        head = None if lookup else drafting_head(head, target, draft_weights)
        self.target, self.head, self.tree, self.sampling = target, head, tree, sampling
        self.kernels = on_gpu if kernels is None else kernels
        self.slots, self.max_rows = slots, max_rows
        if not self.kernels:
            if ranks.world.size > 1:
                split_target(target, ranks.world)
            return
        if tree.builder not in ("chain", "best_first"):
            raise JetspecError("tree.builder", tree.builder, "the engine builds chain, best_first")
        if lookup is not None and tree.builder != "chain":
            raise JetspecError("tree.builder", tree.builder, "prompt lookup drafts chains")
        scored = tree.builder != "chain" and tree.score != "cumulative"  # a chain asks no score
        if scored or tree.widths:
            name = "widths" if tree.widths else "score"
            raise JetspecError(
                f"tree.{name}", getattr(tree, name), "the engine orders by log-probability alone"
            )
        if head is not None and tree.builder == "best_first" and tree.budget > LARGEST_BUDGET:
            mend = f"the engine builds trees of up to {LARGEST_BUDGET} nodes"
            raise JetspecError("tree.budget", tree.budget, mend)
        if sampling.edits_logits:
            raise JetspecError(
                "sampling", "logit_bias, repetition_penalty", "the reference loop alone has them"
            )
        if shared is None:
            products = products or Products(exact=exact)
            model = EngineModel(target, max_rows=max_rows, products=products, ranks=ranks)
            fast = replace(products, exact=False)
            drafts = None
            if head is not None:
                drafts = EngineHead(head, max_rows=max_rows, products=fast, world=ranks.of_head)
            cache = model.new_cache(slots, max_rows, page_size, pages)
            shared = Shared(model, drafts, cache)
        self.model, self.cache = shared.model, shared.cache
        engine_head = shared.head if head else None
        depth = draft_depth(engine_head or lookup, tree)
        if self.model.products.exact and depth >= TAIL:
            mend = f"the bitwise mode drafts at most {TAIL - 1} levels"
            raise JetspecError("tree.depth", depth, mend)
        history = max_rows if lookup else 0
        self.state = State.idle(slots, depth, target.device, forced, history)
        self.round = Round(
            self.model, engine_head, tree, sampling, self.cache, self.state, max_rows, lookup
        )
        graphed = on_gpu if graphs is None else graphs
        self.graphs = Graphs(self.round, self.state, max_rows) if graphed else None
        self._ahead = int(on_gpu) if ahead is None else ahead
        # Rows that rounds under way may fill beyond what the host knows of.
        self._margin = self.round.nodes + self._ahead * (self.round.depth + 1)
        self.rows_left = max_rows - self._margin
        self.reach = max_rows  # no sequence outgrows it in the next round
        self._arrivals = [Arrival.of(self.state) for _ in range(self._ahead + 1)]

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_token_ids: Collection[int] | None = None,
        request_ids: Sequence[int | str] | None = None,
        budgets: Sequence[int] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
        on_answer: Callable[[int, Generation], None] = lambda prompt, generation: None,
    ) -> DecodeResult:
        """As `jetspec.decode.decode`; prompts wait for a slot and for pages.

        On a GPU the seconds of `prefill` are the device's; `verify` is the rest of the wall time.

        Args:
            budgets: draft nodes of each prompt's rounds, where fewer than the tree's (depth, of a
                chain). They change the cost of a round and never the tokens.
            on_tokens: called with the number of tokens written since the last call.
            on_answer: called with each prompt's place and its answer, in the order in which they
                end. A GPU runs the next round meanwhile: what the host does with an answer here
                is free as long as it is short.

        Raises:
            JetspecError: as `jetspec.decode.decode`, or a prompt that cannot fit `max_rows` or the
                pages.
        """
        ids = list(range(len(prompts)) if request_ids is None else request_ids)
        if not self.kernels:
            found = self._reference(prompts, ids, max_new_tokens, stop_token_ids, on_tokens)
            for place, generation in enumerate(found.generations):
                on_answer(place, generation)
            return found
        self._check(prompts, max_new_tokens, len(ids), budgets)
        device = self.target.device
        most = max(self.round.nodes - 1, 1)
        job = Job(
            prompts,
            keys=request_keys(ids, device),
            slots=self.slots,
            limits=[max(1, min(most, limit)) for limit in budgets or [most] * len(prompts)],
            depth=self.round.depth,
            stops=self.target.eos_token_ids if stop_token_ids is None else stop_token_ids,
            new_tokens=max_new_tokens,
            on_tokens=on_tokens,
            on_answer=on_answer,
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started, prefill = time.perf_counter(), Stopwatch(device)
        flights: deque[Flight] = deque()
        while job.waiting or len(job.running):
            self._admit_waiting(job, prefill)
            if len(job.running):
                flights.append(self._fly(job))
                job.hand_over()
                if len(flights) > self._ahead:
                    self._land(flights.popleft(), job)
        job.hand_over()
        seconds = dict.fromkeys(PHASES, 0.0) | {"prefill": prefill.seconds()}
        seconds["verify"] = time.perf_counter() - started - seconds["prefill"]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return DecodeResult(job.generations, seconds, peak)

    @torch.no_grad()
    def launch(self) -> None:
        """Run one round, in which no sequence outgrows `reach`."""
        if self.graphs is not None:
            self.graphs.launch(self.reach)
            return
        self.round.max_context = context_bound(self.reach, self.max_rows)
        self.round.run()

    @torch.no_grad()
    def prepare(self) -> None:
        """Capture every graph that sequences of up to `max_rows` need, so that no decode has to."""
        if self.kernels and self.graphs is not None:
            self.graphs.prepare()

    def _fly(self, job: Job) -> Flight:
        """Enqueue a round and the copy of its result."""
        slots = job.running
        rows = job.rows(slots) + self._margin
        self.cache.resize_all(slots, rows)
        self.reach = int(rows.max())
        self.cache.upload()
        arrival = self._arrivals.pop(0)
        self._arrivals.append(arrival)
        fresh, job.fresh = job.fresh, []
        if fresh:
            arrival.send_anchors(self.state)
        self.launch()
        arrival.send_out(self.state)
        return Flight(job.prompt.copy(), fresh, arrival)

    def _land(self, flight: Flight, job: Job) -> None:
        """Take over what a round committed."""
        out, anchors = flight.arrival.wait()
        ended = job.take(flight.took_part, flight.fresh, anchors, out)
        if ended:
            self._release(ended)

    def _admit_waiting(self, job: Job, prefill: Stopwatch) -> None:
        """Fill free slots; prompts that fit one pass are read together."""
        if not job.waiting:
            return
        free = job.free
        # A pass costs its launches however few prompts it reads: with many slots some wait for it.
        idle = len(free) == self.slots
        if not idle and len(free) < min(len(job.waiting), self.slots // ADMITTED_SHARE):
            return
        while free and job.waiting:
            group: dict[int, int] = {}  # slot -> prompt
            longest = 0
            while free and job.waiting:
                length = len(job.prompts[job.waiting[0]])
                longest = max(longest, length)
                padded = (len(group) + 1) * min(longest, PREFILL_CHUNK)
                rows = length + job.new_tokens + self._margin
                if (group and padded > PREFILL_ROWS) or not self.cache.fits(rows):
                    break
                slot = free.pop(0)
                group[slot] = job.waiting.popleft()
                self.cache.reserve(slot, rows)
            if not group:
                return
            job.begin(group)
            with prefill.running():
                self._admit(group, job)

    @torch.no_grad()
    def _admit(self, group: dict[int, int], job: Job) -> None:
        """Read a group's prompts in chunks into their slots, and sample their first anchors."""
        device, state = self.target.device, self.state
        prompts = [job.prompts[prompt] for prompt in group.values()]
        for slot, prompt in zip(group, prompts, strict=True):
            self.cache.resize(slot, len(prompt) + self._margin)
        self.cache.upload()
        facts = [(s, p, len(job.prompts[p]), job.limits[p]) for s, p in group.items()]
        slots, indices, lengths, limits = to_device(list(zip(*facts, strict=True)), device)
        hidden = read_prompts(self.round, self.cache, prompts, lengths, self.cache.table[slots])
        logits = self.model.logits(hidden)
        keys = job.keys[indices]
        anchors = sample(logits.float(), self.sampling, keys, lengths)
        state.anchors[slots] = anchors
        state.ids[slots, 0] = anchors
        state.prefix[slots] = lengths.int()
        state.active.index_fill_(0, slots, 1)
        state.keys[slots] = keys
        state.limits[slots] = limits
        if state.history is not None:
            keep_texts(state.history, slots, prompts, lengths, anchors)

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            self.cache.release(slot)
        ended = to_device(slots, self.target.device)
        self.state.active.index_fill_(0, ended, 0)
        self.state.prefix.index_fill_(0, ended, 0)

    def _check(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, ids: int,
        budgets: Sequence[int] | None,
    ) -> None:  # fmt: skip
        if not prompts:
            raise JetspecError("prompts", "none", "give at least one")
        if new_tokens < 1:
            raise JetspecError("max_new_tokens", new_tokens, "must be 1 or more")
        if ids != len(prompts):
            raise JetspecError("request_ids", ids, f"give one for each of {len(prompts)}")
        if budgets is not None and len(budgets) != len(prompts):
            raise JetspecError("budgets", len(budgets), f"give one for each of {len(prompts)}")
        for index, prompt in enumerate(prompts):
            where = f"prompts[{index}]"
            if not len(prompt):
                raise JetspecError(where, "empty", "give at least one token")
            rows, asked = len(prompt) + new_tokens, f"{len(prompt)} + {new_tokens} tokens"
            if rows > self.rows_left:
                mend = f"the engine holds {self.rows_left} a sequence; raise max_rows"
                raise JetspecError(where, asked, mend)
            if -(-(rows + self._margin) // self.cache.page_size) > self.cache.pages:
                raise JetspecError(where, asked, "more than all pages hold; give more pages")

    def _reference(
        self, prompts: Sequence[Sequence[int]], ids: list[int | str], new_tokens: int,
        stops: Collection[int] | None, on_tokens: Callable[[int], None],
    ) -> DecodeResult:  # fmt: skip
        """The same on the reference loop, `slots` prompts at a time."""
        found = DecodeResult([], dict.fromkeys(PHASES, 0.0), 0)
        for first in range(0, len(prompts), self.slots):
            drafter: Drafter | None = self.lookup
            if self.head is not None:
                drafter = HeadDrafter(
                    self.head, self.target, width=self.tree.width, depth=self.tree.depth
                )
            part = slice(first, first + self.slots)
            done = decode(
                self.target, prompts[part], drafter=drafter, tree=self.tree,
                sampling=self.sampling, max_new_tokens=new_tokens, stop_token_ids=stops,
                request_ids=ids[part],
            )  # fmt: skip
            found.generations += done.generations
            found.seconds = {name: s + done.seconds[name] for name, s in found.seconds.items()}
            found.peak_bytes = max(found.peak_bytes, done.peak_bytes)
            on_tokens(sum(len(generation.tokens) for generation in done.generations))
        return found
