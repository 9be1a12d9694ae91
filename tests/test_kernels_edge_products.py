"""Products of gathered factors and their gradients, in the interpreter."""

import pytest
import torch

from tests.test_kernels_setup import interpreted

module = interpreted("kernels.edge_products")


@pytest.mark.parametrize(("count", "rank"), [(4, 8), (5, 12)])
def test_products_and_gradients_equal_torchs(count, rank) -> None:
    generator = torch.Generator().manual_seed(rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parents = torch.randn(7, rank, generator=generator).to(device).requires_grad_()
    table = torch.randn(20, rank, generator=generator).to(device).requires_grad_()
    tokens = torch.randint(20, (7, count), generator=generator).to(device)
    tokens[3] = tokens[2]  # two slots share every candidate
    weights = torch.randn(7, count, generator=generator).to(device)

    ours = module.edge_products(parents, table, tokens)
    gradients = torch.autograd.grad((ours * weights).sum(), (parents, table))
    theirs = torch.einsum("mr,mkr->mk", parents, table[tokens])
    expected = torch.autograd.grad((theirs * weights).sum(), (parents, table))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for gradient, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-5)


def test_no_slots_give_zero_gradients() -> None:
    parents = torch.zeros(0, 4, requires_grad=True)
    table = torch.ones(9, 4, requires_grad=True)
    out = module.edge_products(parents, table, torch.zeros(0, 3, dtype=torch.long))
    out.sum().backward()
    assert out.shape == (0, 3) and not table.grad.any()
