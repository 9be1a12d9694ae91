"""What a draft head is: the hooks by which everything else calls it, and the name it goes by.

A head is a class under `DraftHead` with a settings class of its own; the trainer, the checkpoints,
the decoding loop, the replay and the evaluation know it by these hooks only:

- `settings`, and the constructor: the weights' shapes from resolved settings and the target's sizes
- `new`: fresh weights for a target
- `loss`: the training step, from a batch and the teacher's states to a loss and its statistics
- `new_cache`, `extend`, `draft` (or, for a head that drafts otherwise, `drafter` alone)
- `save`, `load`: a directory with the config and the weights; the ones here do for most heads

`registry.py` finds heads by their names; `CONTRIBUTING.md` has the recipe.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from jetspec.drafters.base import Drafter
from jetspec.drafters.head import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.heads.config import HeadSettings
from jetspec.heads.files import CONFIG, WEIGHTS, DType, load_state, read_weights, write_tensors
from jetspec.heads.linear import weights_unset
from jetspec.storage import join, write_json
from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

if TYPE_CHECKING:
    from jetspec.targets.target import Target
    from jetspec.training.blocks import Batch
    from jetspec.training.config import LossConfig
    from jetspec.training.corpus import Corpus
    from jetspec.training.hidden_cache import HiddenStates

OWN = "jetspec_head"  # config.json's key of a head that has no published format
_SIZES = ("hidden_size", "vocab_size", "num_target_layers")


class DraftCache(Protocol):
    """What a head keeps of the committed text between rounds.

    Attributes:
        lengths: long [B], tokens of context held by each sequence; lowering an entry forgets its
            tail. The anchor is never among them.
    """

    lengths: Tensor

    def keep_sequences(self, rows: Tensor) -> None:
        """Drop the sequences that are not in `rows` (long), keep these in this order."""


class DraftHead(nn.Module):
    """A trained drafter over a frozen target; embedding and output projection are the target's.

    Args:
        config: of class `settings`, every size filled in: weights are built from it alone.
        hidden_size, vocab_size, num_target_layers: the target's, recorded so that a head is
            refused by a target of another shape.
    """

    settings: ClassVar[type[HeadSettings]]

    def __init__(
        self, config: Any, *, hidden_size: int, vocab_size: int, num_target_layers: int
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.num_target_layers = num_target_layers

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads."""
        return tuple(self.config.taps or ())

    @property
    def depth(self) -> int:
        """Tokens a path of its draft has, if nobody asks for another depth."""
        return int(self.config.block_size) - 1

    @property
    def scores_paths(self) -> bool:
        """Whether `loss` reports a second loss, that of path scores."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @classmethod
    def unset(cls, config: Any, **sizes: int) -> Self:
        """A head on the CPU whose weights are not set: the caller sets all of them.

        Args:
            config, sizes: as the constructor has them.
        """
        with weights_unset():
            return cls(config, **sizes)

    @classmethod
    def resolve(cls, config: Any, target: "Target") -> Any:
        """`config` with every size that it leaves open filled in from the target."""
        return config

    @classmethod
    def new(cls, config: Any, target: "Target", seed: int = 0) -> Self:
        """Fresh fp32 weights on the target's device: normal(0, 0.02), norms at one.

        The same seed gives the same weights on every device.
        """
        head = cls.unset(
            cls.resolve(config, target),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in head.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, 0.02, generator=generator)
            head.reset()
        return head.to(target.device)

    def reset(self) -> None:
        """Set what must not start at random, such as projections that begin at zero."""

    def empty_copy(self) -> Self:
        """A head of the same shape whose weights are not set, on the CPU."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        return self.unset(self.config, **sizes)

    def added_to(self, start: Self) -> frozenset[str]:
        """Settings in which this head may differ from the one it warm-starts from: parts that
        `start` lacks, or has of another kind, and that begin without changing its slots."""
        return frozenset()

    def inherited(self, start: Self) -> dict[str, Tensor]:
        """Weights of `start` that this head begins with; the others stay fresh."""
        return start.state_dict()

    def left_behind(self, start: Self) -> str | None:
        """What a warm start from `start` does not take though `start` has it: one line, or None."""
        return None

    def path_parameters(self) -> Iterable[nn.Parameter]:
        """What `training.freeze_backbone` leaves to be trained."""
        return ()

    def shards(self) -> Iterable[nn.Module]:
        """Parts that a sharded run gathers one at a time; each is only called, never reached into.

        The rest of the head is gathered for the whole step.
        """
        return ()

    def loss(
        self,
        batch: "Batch",
        taps: Tensor,
        teacher_hidden: Tensor,
        target: "Target",
        config: "LossConfig",
    ) -> tuple[Tensor, Tensor]:
        """(loss summed over slots with their weights, sums as `training.step.Statistics` has them).

        The trainer divides by the batch's sum of weights. Every parameter must get a gradient even
        where the batch holds no slot.

        Args:
            taps: [R, T, n·d], outputs of the tapped layers for `batch.input_ids`.
            teacher_hidden: [R, T, d], the target's last hidden states; `target.project` turns them
                into logits, and the head's own hidden states too.
        """
        raise NotImplementedError

    def finish(
        self, target: "Target", corpus: "Corpus", heldout: np.ndarray, states: "HiddenStates"
    ) -> None:
        """What is done once when training ends, such as calibration; on every worker alike.

        Args:
            heldout: samples of the corpus that were not trained on.
            states: gives the target's hidden states of samples.
        """

    def new_cache(self, batch: int) -> Any:
        """An empty `DraftCache` for `batch` sequences."""
        raise NotImplementedError

    def extend(
        self,
        cache: Any,
        taps: Tensor,
        positions: Tensor,
        valid: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Add committed text to the cache.

        Args:
            taps: [B, T, n·d]; rows that are not `valid` may hold anything finite.
            positions: long [B, T].
            valid: bool [B, T]; the valid rows of a sequence keep their order.
            tokens: long [B, T], the tokens themselves; decoding and replay always give them.
        """
        raise NotImplementedError

    def draft(
        self,
        cache: Any,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        width: int,
        depth: int | None = None,
    ) -> Draft | Tree:
        """Candidates behind each anchor: edges between slots, or a tree to be pruned.

        Args:
            cache: the context strictly before each anchor, so an anchor's position is its length.
            anchors: long [B], the last committed tokens.
            embed: the target's embedding; logits: its output projection, fp32.
            width: K, candidates a slot.
            depth: tokens of a path; None is `self.depth`.
        """
        raise NotImplementedError

    def drafter(self, target: "Target", *, width: int, depth: int | None = None) -> Drafter:
        """A drafter for one batch of sequences at a time."""
        return HeadDrafter(self, target, width=width, depth=depth)

    def save(self, directory: str, *, record: dict[str, Any], dtype: DType = "fp32") -> None:
        """Write `config.json` and `model.safetensors`; the caller closes with a manifest.

        Args:
            record: facts that the doctor compares before the head serves.
            dtype: of the saved tensors; the config says the same.
        """
        write_tensors(join(directory, WEIGHTS), self.state_dict(), dtype)
        config = {
            OWN: self.config.model_dump(mode="json"),
            **{name: getattr(self, name) for name in _SIZES},
            "block_size": self.config.block_size,
            "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
            "jetspec_training": record,
        }
        write_json(join(directory, CONFIG), config)

    @classmethod
    def load(cls, raw: dict[str, Any], directory: str) -> Self:
        """The head of `config.json`'s values `raw`, on the CPU in fp32, ready to draft.

        Raises:
            JetspecError: the config is not one of this head's, or weights do not fit it.
        """
        missing = [name for name in _SIZES if name not in raw]
        if missing:
            raise JetspecError("head", join(directory, CONFIG), f"lacks {missing[0]}")
        try:
            config = cls.settings.model_validate(raw[OWN])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "config"
            mend = f"{first['msg']} ({join(directory, CONFIG)})"
            raise JetspecError(f"head.{key}", first["input"], mend) from error
        head = cls.unset(config, **{name: raw[name] for name in _SIZES})
        load_state(head, read_weights(directory), set(head.state_dict()), directory)
        return head.eval()


HEADS: dict[str, type[DraftHead]] = {}
_Head = TypeVar("_Head", bound=type[DraftHead])


def register(cls: _Head) -> _Head:
    """Class decorator: the head goes by the default of its settings' `kind`."""
    HEADS[cls.settings.model_fields["kind"].default] = cls
    return cls
