"""The rules by which a drafted token is accepted, and what each of them fits."""

from typing import Literal

from jetspec.errors import JetspecError

Rule = Literal["greedy", "sample_and_match", "residual"]

# Their shape is known before any candidate is drawn. Where the shape follows the candidates'
# scores, the candidates that made it into the tree are no fair draw any more.
_DRAWABLE = ("chain", "static")


def resolve_rule(rule: Rule | None, temperature: float, builder: str) -> Rule:
    """`rule` where it fits; None is `greedy` at temperature 0 and `sample_and_match` above.

    - `greedy`: accept the target's best token.
    - `sample_and_match`: draw the target's token, accept the candidate that is it.
    - `residual`: candidates are themselves drawn from the draft's distribution q; accept with
      min(1, p / q), else go on with the next sibling or draw from the residual.

    Raises:
        JetspecError: the rule does not fit the temperature or the tree's builder.
    """
    if rule is None:
        return "sample_and_match" if temperature else "greedy"
    if rule == "greedy" and temperature:
        raise JetspecError("rule", rule, f"needs temperature 0, not {temperature:g}")
    if rule != "greedy" and not temperature:
        raise JetspecError("rule", rule, "needs a temperature above 0; at 0 choose greedy")
    if rule == "residual" and builder not in _DRAWABLE:
        raise JetspecError(
            "rule", rule,
            f"draws its candidates into a fixed shape, and {builder} chooses the shape by their "
            f"scores; choose {' or '.join(_DRAWABLE)}",
        )  # fmt: skip
    return rule
