"""The small-M product against cuBLAS on the linear layers of a Qwen3-8B."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from kernels.benchmarks.timing import cold_copies, relative_error, time_us
from kernels.exact_products import agrees, exact_product
from kernels.small_gemm import GemmPlan, parts_for, small_gemm

WEIGHTS = {  # name: (N, K, how often in the model)
    "qkv": (6144, 4096, 36),
    "o": (4096, 4096, 36),
    "gate_up": (24576, 4096, 36),
    "down": (4096, 12288, 36),
    "lm_head": (151936, 4096, 1),
}
TOKENS = [1, 16, 64, 128]
SHAPES = {  # (N, K) of the linear layers and the output projection
    "Qwen3-8B": [(n, k) for n, k, _ in WEIGHTS.values()],
    "Qwen2.5-0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
}
TRIED_ROWS = (33, 64, 65, 128, 129, 144, 256, 257, 272, 512, 1024, 4096)
TIMED_ROWS = (64, 65, 128, 129, 256, 512)


class Product:
    """One weight's inputs, with enough copies to rotate through."""

    def __init__(self, name: str) -> None:
        self.n, self.k, self.times = WEIGHTS[name]
        copies = cold_copies(self.n * self.k * 2)
        self.weights = [
            torch.randn(self.n, self.k, device="cuda", dtype=torch.bfloat16) * self.k**-0.5
            for _ in range(copies)
        ]

    def x(self, m: int) -> torch.Tensor:
        return torch.randn(m, self.k, device="cuda", dtype=torch.bfloat16)

    def us(self, m: int, plan: GemmPlan | None = None, parts: int | None = None) -> float:
        x = self.x(m)
        out = small_gemm(x, self.weights[0], plan=plan, parts=parts)
        return time_us(
            [partial(small_gemm, x, w, plan=plan, parts=parts, out=out) for w in self.weights],
            repeats=9,
        )

    def cublas_us(self, m: int) -> float:
        x = self.x(m)
        return time_us([partial(linear, x, w) for w in self.weights], repeats=9)

    def error(self, m: int, plan: GemmPlan | None = None, parts: int | None = None) -> float:
        x = self.x(m)
        y = small_gemm(x, self.weights[0], plan=plan, parts=parts)
        y = y.sum(0) if y.dim() == 3 else y
        return relative_error(y, x.float() @ self.weights[0].float().T)


def rows(peers: bool) -> Iterator[dict[str, object]]:
    """One record a weight and M; `model_ms` sums all layers of the model at that M."""
    totals = {m: [0.0, 0.0] for m in TOKENS}
    for name in WEIGHTS:
        product = Product(name)
        for m in TOKENS:
            us = product.us(m)
            cublas = product.cublas_us(m) if peers else float("nan")
            totals[m][0] += us * product.times / 1e3
            totals[m][1] += cublas * product.times / 1e3
            yield {
                "weight": name, "m": m, "error": product.error(m), "us": us,
                "cublas_us": cublas, "floor_us": product.n * product.k * 2 / 4.28e6,
            }  # fmt: skip
        del product
    for m, (ours, cublas) in totals.items():
        yield {"weight": "all", "m": m, "model_ms": ours, "cublas_model_ms": cublas}


def exact_rows() -> Iterator[dict[str, object]]:
    """Where cuBLAS has `small_gemm`'s bits, weight by weight, and what each takes for an 8B."""
    for target, shapes in SHAPES.items():
        for n, k in shapes:
            copies = cold_copies(n * k * 2) if target == "Qwen3-8B" else 1
            scale = k**-0.5
            weights = [
                torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * scale
                for _ in range(copies)
            ]
            for m in TRIED_ROWS:
                same = agrees(weights[0], m, parts_for(n, k))
                row = {"target": target, "n": n, "k": k, "m": m, "same_bits": same}
                if copies > 1 and m in TIMED_ROWS:
                    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                    for name, call in (("small_gemm", small_gemm), ("chosen", exact_product)):
                        calls = [partial(call, x, w) for w in weights]
                        row[f"{name}_us"] = time_us(calls, repeats=9)
                    row["linear_us"] = time_us([partial(linear, x, w) for w in weights], repeats=9)
                yield row
