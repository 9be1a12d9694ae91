"""Which cells the evaluation matrix has."""

from typing import Literal

from pydantic import Field

from jetspec.settings import Settings

Method = Literal["plain", "lookup", "chain", "tree"]


class EvaluationConfig(Settings):
    """The matrix: methods x budgets x batch sizes x slices x temperatures.

    Attributes:
        methods: `plain` is always measured, since every speed-up needs it.
        builders: tree builders compared under the method `tree`.
        slices: prompt slices, one cell each; None is every slice of the evaluation prompts.
        prompts_per_slice: at most this many prompts a cell; None is all of them.
        budgets: draft nodes of a tree; a chain is as long as the head drafts or the budget allows.
        workers: Ray actors that run cells; None is one a GPU, or one on a CPU machine.
    """

    methods: tuple[Method, ...] = ("plain", "lookup", "chain", "tree")
    builders: tuple[Literal["algorithm1", "best_first"], ...] = ("best_first",)
    score: Literal["cumulative", "entropy", "hybrid"] = "cumulative"
    alpha: float = Field(1.0, ge=0)
    width: int = Field(32, ge=1)
    depth: int | None = Field(None, ge=1)
    budgets: tuple[int, ...] = (16, 64, 128)
    batch_sizes: tuple[int, ...] = (1,)
    slices: tuple[str, ...] | None = None
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: int = Field(256, ge=1)
    prompts_per_slice: int | None = Field(None, ge=1)
    warmup_prompts: int = Field(1, ge=0)
    bootstrap_samples: int = Field(2000, ge=100)
    workers: int | None = Field(None, ge=1)
    seed: int = 0
