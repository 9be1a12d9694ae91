"""Drafting in eight bits: other drafts at most, one rounding for every backend, the same text."""

import pytest
import torch

from jetspec.config import RunConfig
from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.evaluation import matrix
from jetspec.evaluation.config import EvaluationConfig
from jetspec.heads.eight_bits import drafting_head, rounded_head
from jetspec.targets.fp8 import quantise, written_out
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

interpreted("kernels.fp8_gemm")

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.engine.layers import Products, product  # noqa: E402
from jetspec.engine.model import EngineHead  # noqa: E402
from jetspec.engine.weights import Fp8Weight  # noqa: E402

SHAPE = {"block_size": 4, "num_layers": 1, "num_taps": 1}
TREE = TreeConfig(builder="best_first", depth=3, budget=4, width=3)


def models(**settings):
    target = tiny_target("qwen3", hidden_size=64, num_layers=1)
    return target, tiny_head(target, **SHAPE, **settings)


def test_the_copy_alone_is_rounded_and_only_once() -> None:
    target, head = models(edges="markov", edge_rank=4)
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    output = target.model.get_output_embeddings().weight.clone()
    rounded = rounded_head(head, target)
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())
    assert torch.equal(target.model.get_output_embeddings().weight, output)
    assert head.projection is None and rounded.projection is not None
    changed = {n for n, w in rounded.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == {n for n in before if "proj" in n and "edges" not in n} | {"fc.weight"}
    for weight in (rounded.projection, rounded.fc.weight, rounded.layers[0].mlp.down_proj.weight):
        assert torch.equal(written_out(*quantise(weight), weight.dtype), weight)
    assert rounded_head(rounded, target) is rounded
    assert drafting_head(head, target, "own") is head and drafting_head(None, target, "fp8") is None


def test_drafts_read_the_rounded_projection_and_the_target_its_own() -> None:
    target, head = models()
    rounded = rounded_head(head, target)
    assert rounded.projection is not None
    rounded.projection[7] = 1e3  # a projection that no target has: the drafts must show it
    rounded.projection[9] = -1e3
    drafter = HeadDrafter(rounded, target, width=2)
    found = []
    propose = drafter.propose
    drafter.propose = lambda *args: found.append(propose(*args)) or found[-1]
    ours = decode(target, [[5, 9, 11]], drafter=drafter, tree=TREE, max_new_tokens=6)
    plain = decode(target, [[5, 9, 11]], max_new_tokens=6)
    assert set(torch.cat([draft.tokens[..., 0].flatten() for draft in found]).tolist()) <= {7, 9}
    assert ours.generations[0].tokens == plain.generations[0].tokens


def test_the_engine_streams_eight_bits_with_the_bits_of_the_weights_written_out() -> None:
    target, head = models()
    rounded = rounded_head(head, target)
    drafts = EngineHead(rounded, max_rows=32, products=Products(exact=True))
    layer = drafts.layers[0]
    for weight in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down, drafts.fc,
                   drafts.context, drafts.projection):  # fmt: skip
        assert isinstance(weight, Fp8Weight) and weight.whole is not None
        x = torch.randn(3, weight.shape[1])
        eight = product(x, weight, drafts.products, whole=True)
        assert torch.equal(eight, product(x, weight.whole, drafts.products, whole=True))
    assert drafts.fc.whole.data_ptr() == rounded.fc.weight.data_ptr()


def test_the_engine_drafts_as_the_reference_loop_does_and_writes_the_targets_text() -> None:
    target, head = models()
    engine = Engine(
        target, head, tree=TREE, slots=1, max_rows=64, page_size=16, kernels=True,
        draft_weights="fp8",
    )  # fmt: skip
    loop = Engine(target, head, tree=TREE, slots=1, draft_weights="fp8", kernels=False)
    ours, theirs = (e.decode([[5, 9, 11]], max_new_tokens=5).generations[0] for e in (engine, loop))
    plain = decode(target, [[5, 9, 11]], max_new_tokens=5).generations[0]
    assert ours.tokens == theirs.tokens == plain.tokens
    assert ours.accepted == theirs.accepted


def test_evaluations_and_replays_draft_with_what_the_run_says(monkeypatch) -> None:
    target, head = models()
    monkeypatch.setattr(matrix, "load_target", lambda config: target)
    monkeypatch.setattr(matrix, "load_fitting_head", lambda uri, target: head)
    assert matrix.load_models(RunConfig(), "head")[1] is head
    run = RunConfig(evaluation=EvaluationConfig(draft_weights="fp8"))
    loaded = matrix.load_models(run, "head")[1]
    assert loaded is not head and loaded.projection is not None
    assert matrix.load_models(run, None)[1] is None


def test_who_does_not_ask_keeps_every_key_and_other_heads_are_refused() -> None:
    assert "draft_weights" not in EvaluationConfig().model_dump()
    assert EvaluationConfig(draft_weights="fp8").model_dump()["draft_weights"] == "fp8"
    target, head = models()
    head.__class__ = type("Other", (torch.nn.Module,), {})
    with pytest.raises(JetspecError, match="draft_weights: fp8: a parallel head has none"):
        rounded_head(head, target)
