"""What a running task tells its study: how far its training is, how fast, and how well it goes."""

import time
from collections.abc import Callable, Mapping

from jetspec.generation.progress import RegenerationProgress
from jetspec.training.config import TrainingConfig
from jetspec.training.loop import Stop

Tell = Callable[[str], None]
EVERY = 20.0
"""Seconds between two lines of one task, at least."""
_TO_SAVE = 5.0  # seconds that the last checkpoint may take


class TrainingProgress:
    """A training's report that tells a line now and then, and ends the training in time.

    Args:
        stop_at: of `time.monotonic()`: the last report that is sure to come before it raises
            `Stop`, so that the steps up to there are kept.
    """

    def __init__(
        self,
        config: TrainingConfig,
        tell: Tell,
        *,
        stop_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._tell, self._stop_at, self._clock = config, tell, stop_at, clock
        self._told = -EVERY + clock()
        self._before: tuple[int, float] | None = None  # (step, time) of the report before

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        before, self._before = self._before, (step, now)
        pace = None if before is None else (now - before[1]) / (step - before[0])
        if now - self._told >= EVERY:
            self._told = now
            self._tell(self._line(step, metrics, pace))
        if self._stop_at is None:
            return
        ahead = 0.0 if pace is None else pace * self._config.log_every
        if now + ahead + _TO_SAVE > self._stop_at:
            raise Stop

    def _line(self, step: int, metrics: Mapping[str, float], pace: float | None) -> str:
        total = self._total(step, metrics["epoch"])
        parts = [f"step {step} of {total}"]
        if pace is not None:
            parts += [f"{pace:.3g} s a step", f"{pace * max(0, total - step):.0f} s left"]
        losses = {name: value for name, value in metrics.items() if "loss" in name}
        return ", ".join(parts + [f"{name} {value:.4g}" for name, value in losses.items()])

    def _total(self, step: int, epoch: float) -> int:
        """Steps of the whole training: epochs are equally long but for a few."""
        most = self._config.max_steps
        whole = max(step, round(self._config.epochs * step / epoch))
        return whole if most is None else min(whole, most)


class StageProgress:
    """Tells how much of another stage is done, now and then."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._told = clock()

    def cells(self, done: int, total: int, record: object) -> None:
        """Hears of a matrix."""
        self._line(f"measured {done} of {total} cells")

    def answers(self, state: RegenerationProgress) -> None:
        """Hears of a regeneration."""
        pace = f"{state.tokens / max(state.seconds, 1e-9):.0f} a second"
        written = f"{state.tokens} tokens written, {pace}"
        self._line(f"{written}; {state.done} of {state.total} answers are in finished shards")

    def _line(self, text: str) -> None:
        now = self._clock()
        if now - self._told >= EVERY:
            self._told = now
            self._tell(text)
