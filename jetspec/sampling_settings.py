"""The sampling settings that sections of a run file share."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from jetspec.settings import Settings

if TYPE_CHECKING:
    from jetspec.sampling import SamplingParams

Token = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(allow_inf_nan=False)]


class SamplingSettings(Settings):
    """What of the target's distribution may be drawn; see `sampling.SamplingParams`.

    Attributes:
        logit_bias: token id -> what is added to its logit; -100 forbids it for all purposes.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"min_p", "repetition_penalty", "logit_bias"})

    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[Token, Bias] = {}

    def sampling_params(self, temperature: float, seed: int) -> "SamplingParams":
        from jetspec.sampling import SamplingParams

        return SamplingParams(
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
        )
