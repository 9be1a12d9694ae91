"""Which frozen model is the target and how it is loaded."""

from typing import Literal

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
    """

    source: str = Field("embedded", min_length=1)
    revision: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    cache_dir: str = "~/.cache/jetspec"
