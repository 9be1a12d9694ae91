"""Which cells the evaluation matrix has and how each is measured."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jetspec.errors import JetspecError
from jetspec.heads.config import DraftWeights
from jetspec.rules import Rule, resolve_rule
from jetspec.sampling_settings import SamplingSettings
from jetspec.targets.config import TargetConfig
from jetspec.trees.config import Score, TreeConfig, Width

Backend = Literal["reference", "engine"]
Method = Literal["plain", "lookup", "draft_model", "chain", "tree"]
# Of a round in the engine: what its kernels for candidates and trees hold.
ENGINE_WIDTH, ENGINE_DEPTH, ENGINE_BUDGET = 32, 64, 1024
EXACT_DEPTH = 31
"""Levels of a draft in the bitwise mode, whose attention gathers so many rows and one more."""

Positive = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]


class EvaluationConfig(SamplingSettings):
    """The matrix: methods x budgets x batch sizes x slices x temperatures.

    Attributes:
        methods: what is measured beside the two baselines (`plain`, our loop without a draft, and
            Hugging Face's `generate`), which every speed-up needs and which are always measured.
        backend: what decodes: the reference loop, or the engine where there is a GPU. Draft models
            and the builders `algorithm1` and `static` stay with the reference loop; their records
            say so and are not compared with the engine's `plain`.
        exact: the engine's bitwise mode: its cells must give plain decoding's tokens in bf16 too,
            near ties included.
        draft_weights: `fp8` drafts with a copy of the head and of the output projection in eight
            bits, in every backend and in replays; the text stays the target's.
        builders: tree builders compared under the method `tree`.
        score, alpha, width, widths, depth, calibration, rank_rates: of the trees; see
            `trees.config.TreeConfig`. A chain is cut to `depth` too.
        rule: how a candidate is accepted; None is greedy at temperature 0 and sample_and_match
            above. `residual` draws its candidates, so its text is another draw from the target's
            distribution and not plain decoding's; see docs/method.md.
        slices: prompt slices, one cell each; `all` is one cell over every slice's prompts mixed;
            None is every slice of the evaluation prompts.
        prompts_per_slice: at most this many prompts of a slice; None is all of them.
        max_batches: at most this many batches a cell; None is as many as the prompts fill.
        budgets: draft nodes of a tree; a chain is as long as the head drafts or the budget allows.
        lookup_depth: tokens copied in a round of prompt lookup.
        lookup_ngram: longest run of tokens that prompt lookup matches.
        draft_model: a small language model with the target's tokenizer, for the method of that
            name; it runs on the target's device.
        draft_model_depth: tokens that the draft model drafts in a round, one after another.
        warmup_prompts: prompts decoded before the clock starts, for every method of a cell.
        warmup_tokens: tokens decoded of each of them.
        scores: what of a head with path scores orders its drafts, a cell for each: `slot` takes its
            edges out, `path` leaves them in; None is the head as it is.
        reference_batch: decode every prompt plainly once, so many side by side, and check every
            cell's text against that (`answers.py`); None checks against the `plain` cell of the
            same group.
        method_batches: methods that decode fewer of a cell's batches than the others, the first so
            many: what costs long and varies little, as plain decoding's clock does from prompt to
            prompt. `hf_eager: 0` leaves out Hugging Face's `generate`.
        repeats: times every batch of prompts is decoded; times are averaged.
        near_tie_ulps: in bf16, a first difference between tokens whose logits lie within this many
            units in the last place of the larger one is a near tie, not an error. Of 899 first
            differences in one matrix 895 were within 2 (docs/results).
        workers: Ray actors that run cells; None is one a GPU, or one on a CPU machine.
        max_attempts: times a cell may bring its worker down before that is its result.
    """

    optional: ClassVar[frozenset[str]] = SamplingSettings.optional | {
        "backend",
        "exact",
        "draft_weights",
        "draft_model",
        "draft_model_depth",
        "rule",
        "widths",
        "calibration",
        "rank_rates",
        "scores",
        "reference_batch",
        "method_batches",
    }

    backend: Backend = "reference"
    exact: bool = False
    draft_weights: DraftWeights = "own"
    methods: tuple[Method, ...] = ("plain", "lookup", "chain", "tree")
    builders: tuple[Literal["algorithm1", "best_first", "static"], ...] = ("best_first",)
    rule: Rule | None = None
    score: Score = "cumulative"
    alpha: float = Field(1.0, ge=0)
    width: int = Field(32, ge=1)
    widths: tuple[Width, ...] = ()
    calibration: tuple[float, ...] = ()
    rank_rates: tuple[float, ...] = TreeConfig().rank_rates
    depth: int | None = Field(None, ge=1)
    budgets: tuple[Positive, ...] = (16, 64, 128)
    lookup_depth: int = Field(10, ge=1)
    lookup_ngram: int = Field(3, ge=1)
    draft_model: TargetConfig | None = None
    draft_model_depth: int = Field(8, ge=1)
    batch_sizes: tuple[Positive, ...] = Field((1,), min_length=1)
    slices: tuple[str, ...] | None = Field(None, min_length=1)
    temperatures: tuple[Temperature, ...] = Field((0.0,), min_length=1)
    max_new_tokens: int = Field(256, ge=2)
    prompts_per_slice: int | None = Field(None, ge=1)
    max_batches: int | None = Field(None, ge=1)
    scores: tuple[Literal["slot", "path"], ...] | None = Field(None, min_length=1)
    reference_batch: int | None = Field(None, ge=1)
    method_batches: dict[Method | Literal["hf_eager"], Annotated[int, Field(ge=0)]] = {}
    warmup_prompts: int = Field(1, ge=0)
    warmup_tokens: int = Field(8, ge=1)
    repeats: int = Field(1, ge=1)
    bootstrap_samples: int = Field(2000, ge=100)
    near_tie_ulps: float = Field(4.0, ge=0)
    workers: int | None = Field(None, ge=1)
    max_attempts: int = Field(2, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _budgets_exist(self) -> "EvaluationConfig":
        if "tree" in self.methods and not (self.budgets and self.builders):
            raise ValueError("the method `tree` needs at least one budget and one builder")
        if "draft_model" in self.methods and self.draft_model is None:
            raise ValueError("the method `draft_model` needs draft_model.source; set it")
        none = {name for name, most in self.method_batches.items() if not most} - {"hf_eager"}
        if none:
            raise ValueError(f"method_batches: at least 1 batch of {min(none)}")
        if "plain" in self.method_batches and self.reference_batch is None:
            raise ValueError(
                "method_batches of plain leave prompts without a text to compare with; set "
                "reference_batch"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "EvaluationConfig":
        builders = ["chain", *(self.builders if "tree" in self.methods else ())]
        try:
            for temperature in self.temperatures:
                for builder in builders:
                    resolve_rule(self.rule, temperature, builder)
        except JetspecError as error:
            raise JetspecError(f"evaluation.{error.field}", error.value, error.mend) from None
        for builder in builders:
            self.tree(builder, budget=1)
        return self

    @model_validator(mode="after")
    def _the_engine_has_it(self) -> "EvaluationConfig":
        """The engine would decode otherwise, or another tree: refused before anything is loaded."""
        if self.backend != "engine":
            if self.exact:
                raise JetspecError(
                    "evaluation.exact", True, "is a mode of the engine; set backend to engine"
                )
            return self
        trees = "tree" in self.methods
        lacking = {
            "rule": self.rule == "residual",
            "logit_bias": bool(self.logit_bias),
            "repetition_penalty": self.repetition_penalty != 1,
            "score": trees and self.score != "cumulative",
            "widths": trees and bool(self.widths),
            "width": self.needs_head and self.width > ENGINE_WIDTH,
            "depth": self.needs_head and (self.depth or 1) > ENGINE_DEPTH,
            "budgets": trees and max(self.budgets) > ENGINE_BUDGET,
        }
        for name, lacks in lacking.items():
            if lacks:
                raise JetspecError(
                    f"evaluation.{name}", getattr(self, name),
                    "more than the engine decodes; set evaluation.backend to reference",
                )  # fmt: skip
        if "lookup" in self.methods:
            self.require_exact_depth("lookup_depth", self.lookup_depth)
        if self.needs_head and self.depth is not None:
            self.require_exact_depth("depth", self.levels(self.depth))
        return self

    def require_exact_depth(self, name: str, levels: int) -> None:
        """Refuse drafts that the bitwise mode cannot verify, where it is on.

        Args:
            name: the setting that makes them so deep.
        """
        if self.exact and levels > EXACT_DEPTH:
            raise JetspecError(
                f"evaluation.{name}", levels, f"the bitwise mode drafts at most {EXACT_DEPTH} "
                "levels; lower it, or set evaluation.exact to false",
            )  # fmt: skip

    def levels(self, depth: int) -> int:
        """Of the engine's deepest draft with a head that drafts `depth` tokens a round."""
        trees = "tree" in self.methods and "best_first" in self.builders
        return depth if trees or not self.budgets else min(depth, max(self.budgets))

    def tree(self, builder: str, budget: int) -> TreeConfig:
        """The trees of one builder and budget."""
        names = ("depth", "width", "widths", "score", "alpha", "calibration", "rank_rates")
        shape = {name: getattr(self, name) for name in names}
        return TreeConfig.model_validate({"builder": builder, "budget": budget, **shape})

    def batches_of(self, method: str) -> int | None:
        """Batches of a cell that `method` decodes at most; None is all of them."""
        return dict(self.method_batches).get(method)  # type: ignore[call-overload]

    @property
    def needs_head(self) -> bool:
        return bool({"chain", "tree"} & set(self.methods))
