"""Path scores trained over the whole vocabulary: `head.edge_normaliser: vocabulary`.

The loss of slots, on slot logits + S(true parent, every token). A chunk's logits exist once: its
gradient is formed in closed form and carried to the two factors of S, which are small.
"""

import torch
from torch import Tensor

from jetspec.heads.edges import EdgeProducer, MarkovEdges, Places
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch
from jetspec.training.config import LossConfig
from jetspec.training.losses import slot_losses_on


def exact_edge_loss(
    edges: EdgeProducer,
    hidden: Tensor,
    teacher_hidden: Tensor,
    batch: Batch,
    places: Places,
    weights: Tensor,
    target: Target,
    config: LossConfig,
) -> Tensor:
    """Weighted sum over slots of the configured loss, teacher-forced: the parent is the true token.

    Args:
        edges: of which every token has child factors.
        hidden: [M, d], detached states of `batch.slots`: path scores never bend the head.
        teacher_hidden: [R, T, d].
        places: where the M slots lie; weights: fp32 [M].
    """
    assert isinstance(edges, MarkovEdges)
    table = edges.child_proj.table(target.embed, target.vocab_size)  # [V, r]
    parents = edges.true_parents(hidden, places, target.embed)  # [M, r]
    # Products over the vocabulary run in the target's type, sums of gradients in fp32.
    children, rows = table.detach().to(target.dtype), parents.detach().to(target.dtype)
    measure = slot_losses_on(hidden.device)
    project = target.project_rounded if hidden.is_cuda else target.project
    teacher = teacher_hidden.flatten(0, 1)
    loss = hidden.new_zeros((), dtype=torch.float32)
    d_table = torch.zeros_like(table, dtype=torch.float32)
    d_parents = torch.zeros_like(parents, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for begin, end, first, last in batch.chunks:
            here = slice(begin, end)
            logits = (rows[here] @ children.T).float()
            logits += project(hidden[here])
            taught = project(teacher[batch.teachers[first:last]])
            found = measure(
                logits, taught, batch.shared[here] - first, places.labels[here], weights[here],
                config.terms, config.temperature,
            )  # fmt: skip
            loss += found.loss
            gradient = found.gradient.to(children.dtype)
            d_parents[here] = (gradient @ children).float()
            d_table += (gradient.T @ rows[here]).float()
    # The gradient of `carrier` is the loss's; its value is not.
    carrier = (parents.float() * d_parents).sum() + (table.float() * d_table).sum()
    return loss + carrier - carrier.detach()
