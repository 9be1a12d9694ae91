"""Draft heads by name: `head.kind` of a run file, and the kind that a directory says it is.

Nothing heavy is imported before a head is asked for: run files are checked by this.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jetspec.errors import JetspecError
from jetspec.heads.config import PARALLEL, HeadConfig, HeadSettings

if TYPE_CHECKING:
    from jetspec.heads.base import DraftHead
    from jetspec.heads.files import DType
    from jetspec.targets.target import Target

# Where the heads of this package live; a module is imported when its head is first asked for.
MODULES = {
    PARALLEL: "jetspec.heads.parallel",
    "dspark": "jetspec.heads.dspark",
    "eagle3": "jetspec.heads.eagle",
}


def head_class(kind: str) -> "type[DraftHead]":
    """The class of a kind of head.

    Raises:
        JetspecError: no head has that name.
    """
    from jetspec.heads.base import HEADS

    if kind not in HEADS and kind in MODULES:
        importlib.import_module(MODULES[kind])
    if kind not in HEADS:
        known = ", ".join(sorted({*HEADS, *MODULES}))
        raise JetspecError("head.kind", kind, f"choose from {known}")
    return HEADS[kind]


def parse_head(value: Any) -> Any:
    """Plain values -> the settings class of their `kind`; anything else as it is.

    Raises:
        JetspecError: no head has that name, or heads of that name have not such a setting.
    """
    if not isinstance(value, dict):
        return value
    kind = value.get("kind", PARALLEL)
    settings = HeadConfig if kind == PARALLEL else head_class(str(kind)).settings
    for name in value:
        if name not in settings.model_fields and kind != PARALLEL:
            # It may well come from a base that was written for another kind.
            mend = f"unknown key of `{kind}` heads; take it out of the run file and of its base"
            raise JetspecError(f"head.{name}", value[name], mend)
    return settings.model_validate(value)


def new_head(config: HeadSettings, target: "Target", seed: int = 0) -> "DraftHead":
    """A fresh head of the kind that `config` names; see `DraftHead.new`."""
    return head_class(config.kind).new(config, target, seed)


def load_head(directory: str) -> "DraftHead":
    """A head of any kind and format, on the CPU in fp32, ready to draft.

    Raises:
        JetspecError: the directory is no head, its config contradicts itself, or weights are
            missing, superfluous or of another shape.
    """
    from jetspec.heads.base import OWN
    from jetspec.heads.files import read_config

    raw = read_config(directory)
    own = raw.get(OWN)
    if own is None:  # a published format; all but DSpark's own heads are parallel
        whole = raw.get("markov_rank") and raw.get("sample_from_anchor", True)
        whole = whole and raw.get("enable_confidence_head", True)
        return head_class("dspark" if whole else PARALLEL).load(raw, directory)
    if not isinstance(own, dict):
        raise JetspecError(f"head.{OWN}", own, "must be a mapping")
    return head_class(str(own.get("kind", PARALLEL))).load(raw, directory)


def save_head(
    head: "DraftHead",
    directory: str,
    *,
    target_fingerprint: str,
    training: dict[str, Any] | None = None,
    dtype: "DType" = "fp32",
) -> None:
    """Write `head`; see `DraftHead.save`.

    Args:
        training: facts the doctor compares before the head serves, such as `enable_thinking`.
    """
    record = {"target_fingerprint": target_fingerprint, **(training or {})}
    head.save(directory, record=record, dtype=dtype)
