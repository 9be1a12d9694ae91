"""`jetspec generate`: one prompt decoded with a registered head, and how it looks.

Tokens that one round committed share a colour, so the eye sees how far each round reached.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from flows.registered import ChampionRecord
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.rules import Rule, resolve_rule

# Neighbouring rounds differ in hue; all are readable on dark and on light.
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_BATCH_SIZE = 1


@dataclass(frozen=True)
class Choice:
    """What the tree is for this request, and why."""

    builder: str
    budget: int
    reason: str


@dataclass(frozen=True)
class Answer:
    """A decoded prompt.

    Attributes:
        tokens, rounds: as in `jetspec.decode.Generation`.
        rule: how drafted tokens were accepted.
        pieces: the text of the prefill's token, then of each round.
        seconds: of decoding after the prefill.
    """

    tokens: list[int]
    rounds: list[int]
    pieces: list[str]
    seconds: float
    finish: str
    choice: Choice
    rule: Rule

    @property
    def tau(self) -> float | None:
        return sum(self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        return sum(self.rounds) / self.seconds if self.rounds and self.seconds > 0 else None

    def as_json(self) -> dict[str, Any]:
        return {
            "text": "".join(self.pieces),
            "tokens": self.tokens,
            "rounds": self.rounds,
            "tau": self.tau,
            "tokens_per_second": self.tokens_per_second,
            "finish": self.finish,
            "builder": self.choice.builder,
            "budget": self.choice.budget,
            "rule": self.rule,
        }


def choose(
    champion: ChampionRecord, config: RunConfig, budget: int | None, builder: str | None = None
) -> Choice:
    """The tree that the serving table names for one request, as far as none is asked for."""
    from jetspec.evaluation.budgets import budget_for

    fallback = builder or config.promotion.builder
    if budget is not None:
        return Choice(fallback, budget, "as asked")
    row = budget_for((champion.serving_table or {}).get("rows", []), _BATCH_SIZE)
    if row["budget"] == 0:
        reason = "the serving table prefers plain decoding here; drafting all the same to show it"
        return Choice(fallback, config.promotion.budget, reason)
    if builder is not None:
        return Choice(builder, row["budget"], "the budget from the serving table")
    return Choice(row["builder"] or "chain", row["budget"], "from the serving table")


def answer(
    champion: ChampionRecord,
    config: RunConfig,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    budget: int | None = None,
    builder: str | None = None,
    rule: Rule | None = None,
) -> Answer:
    """Decode `prompt` as a user's message with the reference loop.

    Args:
        config: `target` is the one the head was made for.
        sampling: fields of `jetspec.sampling.SamplingParams`.
        budget, builder: of the tree; None is the serving table's.
        rule: how a drafted token is accepted; None fits the temperature (see `jetspec.rules`).

    Raises:
        JetspecError: a sampling setting out of range, a rule that does not fit the temperature or
            the tree, or the target is not the one that the champion was made for.
    """
    from jetspec.decode import decode
    from jetspec.heads.registry import load_head
    from jetspec.sampling import SamplingParams
    from jetspec.targets.load import load_target
    from jetspec.trees.config import TreeConfig

    choice = choose(champion, config, budget, builder)
    params = SamplingParams(**sampling)
    try:
        accepting = resolve_rule(rule, params.temperature, choice.builder)
    except JetspecError as error:
        raise JetspecError(f"--{error.field}", error.value, error.mend) from None
    target = load_target(config.target)
    if target.fingerprint != champion.fingerprint:
        raise JetspecError(
            "target",
            config.target.source,
            f"changed since champion {champion.version} was made ({champion.fingerprint[:12]} to "
            f"{target.fingerprint[:12]}); make a new head with `jetspec run`",
        )
    head = load_head(champion.head_uri).to(device=target.device, dtype=target.dtype).eval()
    # The best candidate of a slot is enough where neither path scores nor draws choose another.
    chosen = head.scores_paths or accepting == "residual"
    width = (
        1
        if choice.builder == "chain" and not chosen
        else min(config.evaluation.width, target.vocab_size)
    )
    tree = TreeConfig.model_validate(
        {"builder": choice.builder, "budget": choice.budget, "width": width}
    )
    result = decode(
        target,
        [target.render([{"role": "user", "content": prompt}])],
        drafter=head.drafter(target, width=width),
        tree=tree,
        sampling=params,
        rule=accepting,
        max_new_tokens=max_new_tokens,
        stop_token_ids=target.eos_token_ids,
    )
    generation = result.generations[0]
    shown = [t for t in generation.tokens if t not in target.eos_token_ids]
    return Answer(
        tokens=generation.tokens,
        rounds=generation.rounds,
        pieces=pieces(shown, generation.rounds, target.decode_text),
        seconds=sum(s for phase, s in result.seconds.items() if phase != "prefill"),
        finish=generation.finish,
        choice=choice,
        rule=accepting,
    )


def token_bias(text: str) -> tuple[int, float]:
    """A bias as typed, `TOKEN=BIAS`.

    Raises:
        JetspecError: it is not written like that.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise JetspecError("--logit-bias", text, "write a token id and a number: 42=-1.5") from None


def pieces(
    tokens: Sequence[int], rounds: Sequence[int], decode_text: Callable[[list[int]], str]
) -> list[str]:
    """The text that the prefill, then each round, added; joined they are the whole text.

    A character whose bytes two rounds share belongs to the round that completes it.
    """
    whole = decode_text(list(tokens))
    ends, found, written = [1], [], 0
    for count in rounds:
        ends.append(ends[-1] + count)
    for end in ends:
        text = decode_text(list(tokens[:end])) if end < len(tokens) else whole
        text = text.rstrip("\N{REPLACEMENT CHARACTER}") if end < len(tokens) else text
        # A tokenizer may rewrite what stands before: only a true prefix is shown early.
        if not whole.startswith(text) or len(text) < written:
            text = whole[:written]
        found.append(text[written:])
        written = len(text)
    return found


def colored(answer: Answer) -> Text:
    """The text, one style a round; the prefill's token stays plain."""
    text = Text(answer.pieces[0] if answer.pieces else "", style="dim")
    for i, piece in enumerate(answer.pieces[1:]):
        text.append(piece, style=_STYLES[i % len(_STYLES)])
    return text


def summary(answer: Answer, champion: ChampionRecord) -> str:
    """The figures under the text, in one line."""
    choice = answer.choice
    tau = "-" if answer.tau is None else f"{answer.tau:.2f}"
    speed = answer.tokens_per_second
    return (
        f"tau {tau} ({sum(answer.rounds)} tokens in {len(answer.rounds)} rounds)  "
        f"{'-' if speed is None else f'{speed:.1f}'} tok/s after the prefill  "
        f"{choice.builder} budget {choice.budget}, {choice.reason}  "
        f"[{champion.name} version {champion.version}]"
    )
