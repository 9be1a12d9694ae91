"""Targets in eight bits: the rounding, the target it makes, the kernel, and the engine over it."""

import pytest
import torch

from jetspec.errors import JetspecError
from jetspec.generation.backends import open_backend
from jetspec.generation.config import RegenerationConfig
from jetspec.targets.config import TargetConfig
from jetspec.targets.fp8 import Fp8Linear, quantise, to_fp8, written_out
from jetspec.targets.load import load_target, target_fingerprint
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

reference = interpreted("kernels.reference")
small = interpreted("kernels.small_gemm")
fp8 = interpreted("kernels.fp8_gemm")

from jetspec.decode import decode  # noqa: E402
from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.engine.weights import Fp8Weight  # noqa: E402
from jetspec.trees.config import TreeConfig  # noqa: E402


def rounded(arch: str = "llama", **shape):
    target = tiny_target(arch, **shape)
    to_fp8(target.model, target.name)
    return target


def test_values_keep_three_bits_and_a_second_rounding_changes_none() -> None:
    weight = torch.randn(40, 64) * torch.logspace(-6, 6, 40)[:, None]
    weight[3] = 0
    weight[4, 0] = 448 * 2.0**7
    values, exponents = quantise(weight)
    found = written_out(values, exponents, torch.float32)
    big = weight.abs() > weight.abs().amax(-1, keepdim=True) / 2**12
    assert ((found - weight).abs()[big] <= weight.abs()[big] * 2.0**-4).all()
    assert torch.equal(found[3], weight[3])
    assert exponents[4] == 7 or weight[4].abs().max() > 448 * 2.0**7
    assert torch.equal(written_out(*quantise(found), torch.float32), found)
    assert torch.equal(written_out(values, exponents, torch.bfloat16).float(), found)


def test_a_rounded_target_is_an_ordinary_one_in_half_the_bytes() -> None:
    target = rounded()
    layer = target.model.base_model.layers[0]
    assert layer.mlp.down_proj.codes.dtype == torch.uint8
    target.model.to(torch.float64)  # a change of type leaves the codes alone
    assert layer.mlp.down_proj.codes.dtype == torch.uint8
    target.model.to(torch.float32)
    answers = decode(target, [[5, 9, 11]], max_new_tokens=4).generations
    assert len(answers[0].tokens) == 4


def test_what_cannot_be_rounded_or_would_serve_other_weights_is_refused() -> None:
    moe = tiny_target("qwen3_moe")
    with pytest.raises(JetspecError, match="target.weights: fp8"):
        to_fp8(moe.model, moe.name)
    for backend in ("vllm", "endpoint"):
        with pytest.raises(JetspecError, match="serves its own weights"):
            open_backend(RegenerationConfig(backend=backend), TargetConfig(weights="fp8"))


def test_a_directory_loads_either_way_as_two_targets(tmp_path) -> None:
    tiny = tiny_target("llama", num_layers=1)
    tiny.model.save_pretrained(tmp_path / "tiny")
    tiny.tokenizer.save_pretrained(tmp_path / "tiny")
    shared = {"source": str(tmp_path / "tiny"), "cache_dir": str(tmp_path), "device": "cpu"}
    own = load_target(TargetConfig(**shared))
    eight = load_target(TargetConfig(**shared, weights="fp8"))
    assert isinstance(eight.model.base_model.layers[0].self_attn.q_proj, Fp8Linear)
    assert eight.fingerprint != own.fingerprint
    assert eight.fingerprint == target_fingerprint(TargetConfig(**shared, weights="fp8"))


def test_who_does_not_ask_for_it_keeps_every_key() -> None:
    assert "weights" not in TargetConfig().model_dump()
    assert TargetConfig(weights="fp8").model_dump()["weights"] == "fp8"


@pytest.mark.parametrize(("m", "parts"), [(1, 1), (5, 2), (40, 1)])
def test_the_product_has_the_bits_of_the_weights_written_out(m, parts) -> None:
    x = torch.randn(m, 128)
    values, exponents = quantise(torch.randn(70, 128) * 0.3)
    plan = small.GemmPlan(16, 32, 32, 4, 2)
    ours = fp8.fp8_gemm(x, values, exponents, parts=parts, plan=plan)
    whole = ours if parts == 1 else ours.sum(0)
    assert (whole - reference.fp8_gemm(x, values, exponents)).abs().max() < 5e-5
    written = written_out(values, exponents, torch.float32)
    assert torch.equal(ours, small.small_gemm(x, written, parts=parts, plan=plan))
    with pytest.raises(ValueError, match="K 128"):
        fp8.fp8_gemm(x, values, exponents, parts=16, plan=plan)


@pytest.mark.parametrize("exact", [True, False])
def test_the_engine_decodes_a_rounded_target_as_the_reference_does(exact) -> None:
    target = rounded("qwen2", hidden_size=64, num_layers=1)
    head = tiny_head(target, block_size=4, num_layers=1, num_taps=1)
    tree = TreeConfig(builder="best_first", depth=2, budget=3, width=3)
    engine = Engine(
        target, head, tree=tree, slots=1, max_rows=64, page_size=16, kernels=True, exact=exact
    )
    assert isinstance(engine.model.layers[0].mlp.down, Fp8Weight)
    ours = engine.decode([[5, 9, 11]], max_new_tokens=3).generations
    theirs = decode(target, [[5, 9, 11]], max_new_tokens=3).generations
    assert ours[0].tokens == theirs[0].tokens
