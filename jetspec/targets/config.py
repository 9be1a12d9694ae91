"""Which frozen model is the target and how it is loaded."""

from typing import ClassVar, Literal

from pydantic import Field

from jetspec.settings import Settings

DType = Literal["auto", "bf16", "fp32"]


class TargetConfig(Settings):
    """The frozen target.

    Attributes:
        source: `embedded`, a local directory, a `.gguf` file, or a hub id.
        revision: hub revision; pinned in the lineage when given.
        dtype: `auto` is bf16 on a GPU and fp32 on a CPU.
        device: `auto` takes the GPU when there is one.
        cache_dir: where converted and downloaded targets are kept.
        weights: `own`, or `fp8`: the linear layers rounded to e4m3 times a power of two an output
            channel, half the memory and another target, with a fingerprint of its own.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"weights"})

    source: str = Field("embedded", min_length=1)
    revision: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    cache_dir: str = "~/.cache/jetspec"
    weights: Literal["own", "fp8"] = "own"
