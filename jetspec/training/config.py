"""How a draft head is distilled."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jetspec.settings import Settings

LossKind = Literal["forward_kl", "reverse_kl", "total_variation", "hard_labels"]
Share = Annotated[float, Field(gt=0)]
Mixture = Annotated[dict[LossKind, Share], Field(min_length=1)]


def _form(kind: Any) -> str:
    return "mixture" if isinstance(kind, dict) else "single"


class LossConfig(Settings):
    """Distillation loss (paper eq. 14).

    Attributes:
        kind: forward KL, reverse KL, total variation, or hard labels (the target's own tokens);
            or a mixture, each kind with its share: {hard_labels: 0.1, total_variation: 0.9}.
        temperature: T_KD; the loss is scaled by its square. Hard labels know no temperature.
        gamma: depth weight exp(-(k-1)/gamma); 0 is uniform.
        chunk_tokens: slots whose vocabulary row exists at one time.
        edge_candidates: candidates a slot among which path scores are trained.
        edge_weight: weight of the path scores' loss, when the head has them.
    """

    kind: Annotated[
        Annotated[LossKind, Tag("single")] | Annotated[Mixture, Tag("mixture")],
        Discriminator(_form),
    ] = "forward_kl"
    temperature: float = Field(1.0, gt=0)
    gamma: float = Field(0.0, ge=0)
    chunk_tokens: int = Field(1024, ge=1)
    edge_candidates: int = Field(32, ge=2)
    edge_weight: float = Field(1.0, gt=0)

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """(kind, share) of what is added up; one kind alone has share 1."""
        if isinstance(self.kind, str):
            return ((self.kind, 1.0),)
        return tuple(sorted(self.kind.items()))


class TrainingConfig(Settings):
    """Distillation of one head.

    Attributes:
        anchors: blocks drawn from one row in one step, at most.
        sequence_length: tokens of a row. A row is one sample on a CPU; on a GPU short samples
            share one. What is longer is cut there, and counted.
        batch_size: rows a step over all workers together.
        micro_batch_size: rows a worker holds at one time.
        max_steps: stop here even if epochs remain; None is all epochs.
        optimizer: `muon` moves the backbone's matrices by Muon, at the same learning rate.
        path_learning_rate: of the path scores, on the same schedule; None is `learning_rate`.
        clip_norm: largest norm of the gradients of the path scores, and of the others'.
        workers: Ray Train workers; None is one a GPU, or one on a CPU machine.
        strategy: how the head is spread over workers.
        hidden_states: `online` runs the frozen teacher every step; `cache` stores its hidden
            states once, refused when their size would pass `cache_limit_gb`.
        warm_start: where the first weights come from: a head directory's URI, `champion`,
            `shipped` (the package's own, for the embedded model), or None for fresh ones.
        more_samples: further directories of samples of the same target, for a richer mixture; the
            run's own come first.
        freeze_backbone: train the path scores alone, on a head that stays as it is.
        heldout_fraction: share of the prompts kept out of training for the tau estimate.
        estimate_samples: held-out samples replayed for one tau estimate, at most.
        checkpoint_every: steps between checkpoints; the last two are kept.
    """

    loss: LossConfig = LossConfig()
    anchors: int = Field(512, ge=1)
    sequence_length: int = Field(3072, ge=2)
    batch_size: int = Field(16, ge=1)
    micro_batch_size: int = Field(2, ge=1)
    epochs: int = Field(6, ge=1)
    max_steps: int | None = Field(None, ge=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(3e-4, gt=0)
    path_learning_rate: float | None = Field(None, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_fraction: float = Field(0.04, ge=0, le=1)
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    clip_norm: float = Field(1.0, gt=0)
    workers: int | None = Field(None, ge=1)
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    hidden_states: Literal["online", "cache"] = "online"
    cache_limit_gb: float = Field(20.0, gt=0)
    warm_start: str | None = None
    more_samples: tuple[str, ...] = ()
    freeze_backbone: bool = False
    heldout_fraction: float = Field(0.05, gt=0, lt=1)
    estimate_samples: int = Field(32, ge=1)
    estimate_every: int = Field(200, ge=1)
    checkpoint_every: int = Field(200, ge=1)
    log_every: int = Field(10, ge=1)
    seed: int = 0

    def shaping(self) -> dict[str, Any]:
        """The settings that decide the head; how the work is spread only changes its rounding.

        Samples and the warm start decide too: by their contents, wherever they lie.
        """
        left_out = {"workers", "strategy", "hidden_states", "cache_limit_gb", "warm_start"}
        left_out |= {"log_every", "checkpoint_every", "estimate_every", "more_samples"}
        # Keys made without these stay valid.
        fields = type(self).model_fields
        for name in ("freeze_backbone", "optimizer", "path_learning_rate"):
            if getattr(self, name) == fields[name].default:
                left_out.add(name)
        return self.model_dump(mode="json", exclude=left_out)
