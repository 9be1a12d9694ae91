"""A library's products are used where they have been seen to have our bits, and nowhere else."""

import pytest
import torch

from tests.test_kernels_setup import interpreted

exact_products = interpreted("kernels.exact_products")
small_gemm = interpreted("kernels.small_gemm").small_gemm

N, K, PARTS = 48, 64, 2


@pytest.fixture
def library(monkeypatch):
    """Its rows a call, and whether it sums in our order; every product may go to it."""
    calls, order = [], {"ours": True}

    def product(x, w, parts):
        calls.append(len(x))
        if order["ours"]:
            return small_gemm(x, w, parts=parts)
        # The same sums, cut elsewhere.
        return torch.stack([x[:, at:] @ w[:, at:].T for at in range(0, K, K // parts)])

    monkeypatch.setattr(exact_products, "_library", product)
    monkeypatch.setattr(exact_products, "_many", lambda x: len(x) > 3)
    monkeypatch.setattr(exact_products, "ALIGNMENT", 1)  # the CPU's allocations have less
    monkeypatch.setattr(exact_products, "PADDED_ROWS", 8)
    monkeypatch.setattr(exact_products, "_agreed", {})
    return calls, order


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize(("rows", "asked"), [(3, []), (4, [4, 4]), (8, [8, 8]), (9, [16, 16])])
def test_a_shape_is_tried_once_and_then_used_with_rows_padded(library, rows, asked, parts) -> None:
    calls, _ = library
    x, w = normal(rows, K), normal(N, K)
    for _ in range(2):
        found = exact_products.exact_product(x, w, parts=parts)
        assert torch.equal(found, small_gemm(x, w, parts=parts)) and found.is_contiguous()
    assert calls == asked + asked[1:]


def test_a_library_with_other_bits_is_tried_once_and_never_used(library) -> None:
    calls, order = library
    order["ours"] = False
    x, w = normal(5, K), normal(N, K)
    for _ in range(3):
        found = exact_products.exact_product(x, w, parts=PARTS)
        assert torch.equal(found, small_gemm(x, w, parts=PARTS))
    assert calls == [5]
    exact_products.exact_product(normal(6, K), w, parts=PARTS)
    assert calls == [5, 6], "each number of rows is a shape of its own"


def test_nothing_is_tried_while_a_graph_is_captured(library, monkeypatch) -> None:
    calls, _ = library
    x, w = normal(5, K), normal(N, K)
    monkeypatch.setattr(exact_products, "_capturing", lambda device: True)
    assert torch.equal(exact_products.exact_product(x, w, parts=1), small_gemm(x, w, parts=1))
    assert calls == []
    monkeypatch.setattr(exact_products, "_capturing", lambda device: False)
    exact_products.exact_product(x, w, parts=1)
    assert calls == [5, 5]


def test_operands_at_other_addresses_than_a_trials_stay_with_our_product(
    library, monkeypatch
) -> None:
    calls, _ = library
    monkeypatch.setattr(exact_products, "ALIGNMENT", 256)
    held = torch.zeros(5 * K + 256)
    first = -held.data_ptr() // 4 % 64  # of a multiple of 256 bytes
    w = held[: N * K].new_zeros(N * K + 64)
    w = w[-w.data_ptr() // 4 % 64 :][: N * K].view(N, K)
    for shift, asked in ((1, []), (0, [5, 5])):
        x = held[first + shift :][: 5 * K].view(5, K)
        exact_products.exact_product(x, w, parts=1)
        assert calls == asked


def test_the_librarys_settings_are_put_back(monkeypatch) -> None:
    preferred = ["default"]

    def prefer(library=None):
        preferred.extend([library] if library else [])
        return preferred[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    settings = torch.backends.cuda.matmul
    names = (
        "allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k",
    )  # fmt: skip
    before = [getattr(settings, name) for name in names]
    with exact_products._uncut():
        assert [getattr(settings, name) for name in names] == [False, False]
    assert [getattr(settings, name) for name in names] == before
    assert preferred == ["default", "cublaslt", "default"]


def test_the_engine_tries_a_library_only_where_it_is_asked_to(monkeypatch) -> None:
    from jetspec.engine import layers

    tried = []
    monkeypatch.setattr(layers, "exact_product", lambda x, w, parts: tried.append(len(x)))
    x, w = normal(40, K), normal(N, K)
    assert torch.equal(
        layers.product(x, w, layers.Products(exact=True), whole=True), small_gemm(x, w, parts=1)
    )
    assert tried == []
    layers.product(x, w, layers.Products(exact=True, tried=True))
    assert tried == [40]
