"""The fused distillation losses against the plain ones, in the interpreter."""

import pytest
import torch

from jetspec.training.losses import TOP_K_GROUP, slot_losses, top_k
from tests.test_kernels_setup import interpreted

distillation = interpreted("kernels.distillation")

KINDS = ("forward_kl", "reverse_kl", "total_variation", "hard_labels")
ALL = {kind: 0.2 + 0.3 * index for index, kind in enumerate(KINDS)}


def problem(vocab, slots=5, positions=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocab)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student = torch.randn(slots, vocab, generator=generator).mul(3)
    taught = torch.randn(positions, vocab, generator=generator).mul(3)
    student[0, 7:9] = 20.0  # equal best tokens: the lower one counts
    taught[0, 7] = 20.0
    shared = torch.arange(slots) * positions // slots
    labels = torch.randint(vocab, (slots,), generator=generator)
    weights = torch.rand(slots, generator=generator)
    logits = (student.to(dtype), taught.to(dtype))
    return [x.to(device) for x in (*logits, shared, labels, weights)]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", [*KINDS, ALL], ids=str)
def test_fused_losses_equal_the_plain_ones(kind, temperature) -> None:
    given = problem(5001)
    terms = tuple((kind if isinstance(kind, dict) else {kind: 1.0}).items())
    ours = distillation.slot_losses(*given, terms, temperature)
    plain = slot_losses(*given, terms, temperature)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.student_lse, plain.student_lse)
    torch.testing.assert_close(ours.teacher_lse, plain.teacher_lse)
    assert torch.equal(ours.hits, plain.hits)


def test_bf16_logits_are_summed_in_fp32_and_their_gradient_is_bf16() -> None:
    given = problem(3000, dtype=torch.bfloat16)
    terms = (("forward_kl", 1.0),)
    ours = distillation.slot_losses(*given, terms, 1.0)
    plain = slot_losses(given[0].float(), given[1].float(), *given[2:], terms, 1.0)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-5, atol=1e-5)
    assert ours.gradient.dtype is torch.bfloat16
    torch.testing.assert_close(ours.gradient.float(), plain.gradient, rtol=1e-2, atol=1e-5)


def test_logits_of_slots_and_teachers_may_differ_in_type() -> None:
    student, taught, *rest = problem(3000)
    taught, terms = taught.bfloat16(), (("forward_kl", 0.5), ("hard_labels", 0.5))
    ours = distillation.slot_losses(student, taught, *rest, terms, 1.0)
    plain = slot_losses(student, taught.float(), *rest, terms, 1.0)
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.gradient, plain.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("vocab", [2048, 2500, 4097])
def test_group_maxima_give_the_same_best_tokens(vocab) -> None:
    student, *rest = problem(vocab)
    maxima = distillation.slot_losses(student, *rest, (("hard_labels", 1.0),), 1.0).group_maxima
    assert distillation.GROUP == TOP_K_GROUP
    best, tokens = top_k(student, 6, maxima=maxima)
    assert torch.equal(best, student.topk(6).values)
    assert torch.equal(student.gather(1, tokens), best)


def test_no_slots_is_no_loss() -> None:
    student, taught, *rest = problem(300)
    given = (student[:0], taught[:0], *(x[:0] for x in rest))
    found = distillation.slot_losses(*given, (("forward_kl", 1.0),), 1.0)
    assert found.loss == 0 and found.gradient.shape == (0, 300)
