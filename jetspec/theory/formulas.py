"""Expected tokens of a round and the speed-up they give (arXiv 2606.18394, eq. 2-3).

tau is tokens committed a round, the bonus included. Costs are in units of one plain decoding step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jetspec.trees.tree import Tree


def expected_chain_tokens(acceptance: float, length: int) -> float:
    """Eq. 2: E[tokens a round] of a chain of N draft tokens, (1 - a^(N+1)) / (1 - a).

    Args:
        acceptance: a, the probability that a draft token is accepted after the ones before it.
        length: N.
    """
    if acceptance == 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def expected_tree_tokens(parents: Sequence[int], edge_acceptance: Sequence[float]) -> float:
    """E[tokens a round] of a tree: 1 + the sum over nodes of P(the path to the node is accepted).

    A round commits as many draft tokens as the accepted path has nodes, so its expectation is the
    sum of the nodes' indicators'. Putting a tree's budget into eq. 2 instead is a mistake.

    Args:
        parents: parent of each node, -1 for the root at index 0; parents come before children.
        edge_acceptance: P(node accepted | its parent was); the root's entry is not read.
    """
    reached = [1.0]
    for node in range(1, len(parents)):
        reached.append(reached[parents[node]] * edge_acceptance[node])
    return sum(reached)


def tree_expectation(tree: Tree) -> Tensor:
    """fp32 [B]: tokens a round of each tree if its node scores were the target's probabilities.

    `expected_tree_tokens` with exp(score), the cumulative draft probability, as P(path accepted).
    This is what `best_first` maximises at a given budget.
    """
    nodes = tree.valid() & (tree.depths > 0)
    return 1 + torch.where(nodes, tree.scores.float().exp(), 0.0).sum(1)


def expected_speedup(tokens_per_round: float, length: int, draft_cost: float) -> float:
    """Eq. 3: tau / (N·c + 1); a verification costs one plain step, each of N draft tokens c.

    Args:
        tokens_per_round: tau, measured or expected.
        length: N, the budget.
        draft_cost: c(N, L) = (T_draft / N) / T_verify.
    """
    return tokens_per_round / (length * draft_cost + 1)


def round_speedup(tokens_per_round: float, verify: float, draft: float, other: float = 0) -> float:
    """Eq. 3 with a verification at its own price: tau / (verify + draft + other).

    Eq. 3 as printed is the case verify = 1, draft = N·c: true while a machine is bound by its
    memory, too kind where many nodes or many sequences make it bound by arithmetic.

    Args:
        verify, draft, other: seconds of a round's parts over the seconds of a plain step.
    """
    return tokens_per_round / (verify + draft + other)


def needed_tau(verify: float, draft: float, other: float = 0) -> float:
    """The tau from which drafting is faster than plain decoding: what a round costs."""
    return verify + draft + other


def acceptance_of(tokens_per_round: float, length: int) -> float:
    """The a that gives a chain of N this tau: eq. 2 inverted, by bisection.

    Args:
        tokens_per_round: between 1 and N + 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_chain_tokens(middle, length) < tokens_per_round:
            low = middle
        else:
            high = middle
    return (low + high) / 2
