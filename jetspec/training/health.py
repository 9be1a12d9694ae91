"""Whether a step's loss and gradient are numbers, found out without making a GPU wait."""

import torch
from torch import Tensor

from jetspec.errors import JetspecError


def not_finite(step: int, loss: float, norm: float) -> JetspecError:
    """What ends a run whose loss or gradient is no number."""
    return JetspecError(
        "training.loss",
        f"{loss} (gradient norm {norm}) at step {step}",
        "not finite; lower training.learning_rate, then run again from the last checkpoint",
    )


class Health:
    """[loss sum, gradient norm] of step `step`, on the way to the host as soon as they are known.

    Asked for after the next step is enqueued, they would be copied behind it.
    """

    def __init__(self, step: int, values: Tensor) -> None:
        self.step = step
        self._values = values.to("cpu", non_blocking=True)
        stream = torch.cuda.current_stream(values.device) if values.is_cuda else None
        self._copied = stream.record_event() if stream is not None else None

    def values(self) -> Tensor:
        """On the CPU; waits for the step, and for none behind it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
