"""The engines that decode the cells of a matrix.

An engine is made for one shape of drafts, one sampling and one number of slots, and on a GPU its
graphs take seconds to capture. All engines of a matrix share the fused weights; those of one batch
size and temperature share pages too and are kept from slice to slice, since their cells take turns.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jetspec.engine.engine import PAGE_SIZE, Engine, Shared
from jetspec.engine.launches import SHORTEST_BOUND
from jetspec.engine.layers import Products
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.engine.paged_cache import PagedCache
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import ENGINE_DEPTH, EvaluationConfig
from jetspec.evaluation.methods import (
    Decoded,
    Request,
    Runner,
    cell_tree,
    lookup_drafter,
    sampling_params,
    synchronize,
)
from jetspec.evaluation.scoring import scored_head
from jetspec.trees.config import TreeConfig

_BUILDERS = (None, "chain", "best_first")
_CHAIN = TreeConfig(builder="chain")


class Engines:
    """Engines by cell, made when a cell first decodes.

    Without a GPU they decode no cell: the reference loop does.

    Args:
        target, head: the head is None where nothing drafts with one.
        kernels: run the kernels even without a GPU (Triton's interpreter, for tests).
        least_rows: longest sequence that the first engines hold; longer prompts need new ones.
            0 makes nothing, and refuses no target, before a cell decodes.

    Raises:
        JetspecError: a target or a head that the engine does not run.
    """

    def __init__(
        self, target: Any, head: Any | None, config: EvaluationConfig, *,
        kernels: bool | None = None, least_rows: int = SHORTEST_BOUND, page_size: int = PAGE_SIZE,
    ) -> None:  # fmt: skip
        self._target, self._head, self._config = target, head, config
        self._kernels = target.device.type == "cuda" if kernels is None else kernels
        self._page_size, self._rows = page_size, 0
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._weights: tuple[EngineModel, EngineHead | None] | None = None
        self._cache: PagedCache | None = None
        self._cache_for: tuple[int, float] | None = None
        if not config.needs_head:
            self._head = None
        if self._kernels:
            if least_rows:
                self._fuse(least_rows)
            self._require_depth()

    def decodes(self, cell: Cell) -> bool:
        """Whether the engine decodes the cell; the reference loop has the others."""
        heads = cell.method in ("chain", "tree") and self._head is not None
        able = heads or cell.method in ("plain", "lookup")
        return self._kernels and cell.builder in _BUILDERS and able

    def runner(self, cell: Cell) -> Runner:
        """A call `(requests, max_new_tokens) -> Decoded` for a cell that the engine decodes.

        The clock starts when the engine is there, graphs and all. It ends when the device is idle:
        a round that was enqueued before the last stop was known counts.
        """

        def run(requests: Sequence[Request], limit: int) -> Decoded:
            longest = max(len(request.input_ids) for request in requests)
            try:
                engine = self._engine(cell, longest)
                started = time.perf_counter()
                result = engine.decode(
                    [request.input_ids for request in requests],
                    max_new_tokens=limit,
                    stop_token_ids=self._target.eos_token_ids,
                    request_ids=[request.request_id for request in requests],
                )
                synchronize(self._target)
            except Exception:
                self._drop()  # its sequences hold pages that the other engines need
                raise
            wall = time.perf_counter() - started
            return Decoded(
                outputs=[list(g.tokens) for g in result.generations],
                rounds=[list(g.rounds) for g in result.generations],
                accepted=[list(g.accepted) for g in result.generations],
                prefill_seconds=result.seconds["prefill"],
                decode_seconds=wall - result.seconds["prefill"],
                peak_bytes=result.peak_bytes or None,
                decoder="engine",
            )

        return run

    def _engine(self, cell: Cell, longest: int) -> Engine:
        """The cell's engine, for prompts of up to `longest` tokens."""
        # The nodes of a round, and what a round that is under way unseen may commit.
        copied = self._config.lookup_depth if "lookup" in self._config.methods else 0
        nodes = max(cell.budget, *self._config.budgets, copied, 1)
        margin = nodes + max(ENGINE_DEPTH, copied) + 3
        rows = longest + self._config.max_new_tokens + margin
        if rows > self._rows:
            self._drop()
            self._fuse(1 << (rows - 1).bit_length())
        if self._cache_for != (cell.batch_size, cell.temperature):
            self._drop()
        assert self._weights is not None
        model, drafts = self._weights
        if self._cache is None:
            self._cache = model.new_cache(cell.batch_size, self._rows, self._page_size)
            self._cache_for = (cell.batch_size, cell.temperature)
        head = scored_head(self._head, cell.scores)
        tree = cell_tree(cell, head, self._config)
        drafter = None if tree is None else head
        if cell.method == "lookup":
            drafter = lookup_drafter(cell, self._config)
        key = (cell.method, cell.builder, cell.budget, cell.scores)
        if key not in self._engines:
            engine = Engine(
                self._target, drafter, tree=tree or _CHAIN,
                slots=cell.batch_size, max_rows=self._rows,
                sampling=sampling_params(self._config, cell.temperature),
                kernels=True, page_size=self._page_size,
                shared=Shared(model, _drafting(drafts, head), self._cache),
            )  # fmt: skip
            engine.prepare()
            self._engines[key] = engine
        return self._engines[key]

    def _fuse(self, rows: int) -> None:
        """The target and the head for sequences of up to `rows` rows."""
        self._rows, self._weights = rows, None  # the old ones go as the new ones come
        products, drafts = Products(exact=self._config.exact), None
        try:
            model = EngineModel(self._target, max_rows=rows, products=products)
            if self._head is not None:
                # A draft decides how much is accepted, never what: it stays fast.
                fast = replace(products, exact=False)
                drafts = EngineHead(self._head, max_rows=rows, products=fast)
        except JetspecError as error:
            what = f"{error.field} {error.value} is none that the engine runs"
            mend = f"{what}; set reference"
            raise JetspecError("evaluation.backend", "engine", mend) from error
        self._weights = (model, drafts)

    def _drop(self) -> None:
        self._engines.clear()
        self._cache = self._cache_for = None

    def _require_depth(self) -> None:
        """Refuse drafts that the engine would cut shorter than the reference loop or not verify."""
        if self._head is None:
            return
        depth = self._config.depth or self._head.depth
        bidirectional = getattr(self._head.config, "mask", "causal") != "causal"
        if depth > ENGINE_DEPTH or (bidirectional and depth > self._head.depth):
            raise JetspecError(
                "evaluation.depth", depth, "more levels than the engine drafts with this head; "
                "set evaluation.backend to reference",
            )  # fmt: skip
        self._config.require_exact_depth("depth", self._config.levels(depth))


def _drafting(drafts: EngineHead | None, head: Any) -> EngineHead | None:
    """The fused head with the edges of `head`, or without any where that has none."""
    if drafts is None or drafts.head is head:
        return drafts
    seen = copy.copy(drafts)
    seen.head = head
    return seen
