"""The draft model of the method `draft_model`: found, loaded once, and held against the target."""

import contextlib
import functools
from collections.abc import Iterator

from jetspec.drafters.model import require_same_tokens
from jetspec.errors import JetspecError
from jetspec.evaluation.config import EvaluationConfig
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target, target_fingerprint
from jetspec.targets.target import Target

FIELD = "evaluation.draft_model"


def draft_model(config: EvaluationConfig, target: Target) -> Target:
    """The configured draft model on the target's device; the same one for every cell.

    Raises:
        JetspecError: it cannot be loaded, or reads other tokens than the target.
    """
    assert config.draft_model is not None
    with _named():
        model = _loaded(config.draft_model.model_copy(update={"device": str(target.device)}))
    require_same_tokens(model, target, FIELD)
    return model


def draft_model_key(config: EvaluationConfig) -> dict[str, object] | None:
    """What of a draft model shapes a matrix; None where no method drafts with one."""
    if "draft_model" not in config.methods:
        return None
    assert config.draft_model is not None
    with _named():
        mark = target_fingerprint(config.draft_model)
    dtype, depth = config.draft_model.dtype, config.draft_model_depth
    return {"fingerprint": mark, "dtype": dtype, "depth": depth}


@functools.lru_cache(maxsize=1)
def _loaded(config: TargetConfig) -> Target:
    return load_target(config)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Errors of loading name the draft model's settings, not the target's."""
    try:
        yield
    except JetspecError as error:
        field = error.field.replace("target", FIELD, 1)
        raise JetspecError(field, error.value, error.mend) from error
