"""One target over two processes (gloo, kernels interpreted): one's tokens, agreed on by both."""

import multiprocessing
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams
from jetspec.targets.fp8 import to_fp8
from jetspec.training.world import World
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.test_training_loop import _free_port
from tests.tiny import tiny_head, tiny_target

ranks_kernels = interpreted("kernels.ranks")  # before the engine imports the kernels

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.engine.layers import Products  # noqa: E402
from jetspec.engine.model import EngineHead, EngineModel  # noqa: E402
from jetspec.engine.parallel import Output, Ranks, split_layers, split_target  # noqa: E402
from kernels.topk import topk_logsumexp  # noqa: E402

PROMPT = [7, 8, 30, 31, 32, 33, 12]
CHAIN = TreeConfig(builder="chain", depth=3, budget=3, width=4)
TREE = TreeConfig(builder="best_first", depth=3, budget=5, width=3)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=3)
TREE_CASE = {"arch": "llama", "tree": TREE, "rank": 4, "prompt": [57, 39, 30, 31]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"arch": "llama", "tree": None},
    "plain, sampled, bitwise": {"arch": "qwen2", "tree": None, "sampling": SAMPLED, "exact": True},
    # After its prompt and the tree's, the random heads guess a token right.
    "chain, head and output whole": {
        "arch": "qwen3",
        "tree": CHAIN,
        "prompt": [22, 57, 30, 31],
        "whole": True,
    },
    "tree": {**TREE_CASE, "tokens": 4},
    "tree, reference loop": {**TREE_CASE, "tokens": 4, "kernels": False},
}


def models(arch, rank=0):
    target = tiny_target(arch, hidden_size=64, num_layers=1)
    return target, tiny_head(target, num_layers=1, block_size=4, edge_rank=rank)


def run_case(
    world,
    arch,
    tree,
    rank=0,
    prompt=PROMPT,
    sampling=GREEDY,
    tokens=3,
    whole=False,
    **options,
):
    """(tokens, rounds, what every round decided, as plain lists)."""
    target, head = models(arch, rank)
    engine = Engine(
        target, head if tree else None, tree=tree or CHAIN, sampling=sampling, slots=1, max_rows=64,
        page_size=16, ranks=Ranks(world, split_head=not whole, split_output=not whole),
        **{"kernels": True, **options},
    )  # fmt: skip
    seen: list[Any] = []
    if engine.kernels:
        accept = engine.round.accept

        def watched(built, following):
            taken = accept(built, following)
            state = engine.state
            seen.append(
                [t.tolist() for t in (*vars(built).values(), following, *taken, state.prefix)]
            )
            return taken

        engine.round.accept = watched
    done = engine.decode([prompt], max_new_tokens=tokens, stop_token_ids=()).generations
    return [g.tokens for g in done], [g.rounds for g in done], seen


def reference(arch, tree, rank=0, prompt=PROMPT, sampling=GREEDY, tokens=3, **_):
    target, head = models(arch, rank)
    drafter = HeadDrafter(head, target, width=tree.width, depth=tree.depth) if tree else None
    done = decode(
        target, [prompt], drafter=drafter, tree=tree or CHAIN, sampling=sampling,
        max_new_tokens=tokens, stop_token_ids=(),
    ).generations  # fmt: skip
    return [g.tokens for g in done], [g.rounds for g in done]


def _worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=100))
    try:
        for name, case in CASES.items():
            queue.put((name, rank, run_case(World(rank, 2, 2), **case)))
    except Exception as error:
        queue.put((name, rank, error))
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair():
    """{(case, rank): (tokens, rounds, decisions)} of two processes that decode together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the processes share one import
    queue, port = context.Queue(), _free_port()
    workers = [
        context.Process(target=_worker, args=(rank, port, queue), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    found = {}
    for _ in range(2 * len(CASES)):
        name, rank, result = queue.get(timeout=120)
        if isinstance(result, Exception):
            raise result
        found[name, rank] = result
    for worker in workers:
        worker.join(30)
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_decode_what_one_decodes(pair, name) -> None:
    tokens, rounds, _ = pair[name, 0]
    assert (tokens, rounds) == reference(**CASES[name])
    assert rounds[0][0] == 2 or CASES[name]["tree"] is None, "nothing was accepted"


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.get("kernels", True)])
def test_trees_positions_and_paths_are_equal_on_every_rank(pair, name) -> None:
    (_, _, ours), (_, _, theirs) = pair[name, 0], pair[name, 1]
    assert ours
    assert ours == theirs, "a float among them would differ in its last bit first"


@pytest.mark.parametrize("width", [1, 3])
def test_merged_candidates_are_those_of_the_whole_vocabulary(width) -> None:
    """Ties between ranks and within one, an infinite logit, three ranks."""
    logits = torch.randn(3, 96).mul(2).round().div(2)
    logits[1, 40:50] = float("-inf")
    logits[2] = 0.0
    whole = topk_logsumexp(logits, width)
    parts = [
        ranks_kernels.pack_best(*topk_logsumexp(part.contiguous(), width), first)
        for first, part in zip((0, 32, 64), logits.split(32, 1), strict=True)
    ]
    merged = ranks_kernels.merge_packed(torch.stack(parts))
    assert torch.equal(merged[0], whole[0]) and torch.equal(merged[1], whole[1])
    torch.testing.assert_close(merged[2], whole[2])


def test_what_cannot_be_split_is_refused_in_one_line() -> None:
    target, head = models("llama")
    three, two = World(0, 3, 3), World(0, 2, 2)
    with pytest.raises(JetspecError, match=r"ranks: 3: do not divide 4 heads$"):
        split_target(target, three)
    with pytest.raises(JetspecError, match=r"ranks: 4: do not divide 2 KV heads$"):
        EngineHead(head, max_rows=64, products=Products(), world=World(0, 4, 4))
    with pytest.raises(JetspecError, match="mixtures of experts"):
        split_target(tiny_target("qwen3_moe"), two)
    with pytest.raises(JetspecError, match="do not divide the vocabulary of 64"):
        Output.of(torch.zeros(64, 8), Ranks(three, split_output=True))
    fused = SimpleNamespace(self_attn=SimpleNamespace(), mlp=None)
    with pytest.raises(JetspecError, match="layers are fused"):
        split_layers([fused], two, heads=4, kv_heads=2)
    assert target.model.base_model.layers[0].self_attn.q_proj.out_features == 64  # as it was
    split_target(target, two)
    split_target(target, two)  # a second engine of the same target splits nothing again
    assert target.model.base_model.layers[0].self_attn.q_proj.weight.shape == (32, 64)
    with pytest.raises(JetspecError, match="load them again"):
        EngineModel(target, max_rows=64, products=Products())


@pytest.mark.parametrize("eight_bits", [False, True])
def test_the_ranks_parts_put_together_are_the_whole(eight_bits) -> None:
    whole, *parts = (tiny_target("qwen2", hidden_size=64, num_layers=1) for _ in range(3))
    for target in (whole, *parts):
        if eight_bits:
            to_fp8(target.model, "tiny")
    for rank, target in enumerate(parts):
        split_target(target, World(rank, 2, 2))
    first, *others = (target.model.base_model.layers[0] for target in (whole, *parts))
    state = [dict(layer.state_dict()) for layer in others]
    for name, tensor in first.state_dict().items():
        closing = name.split(".")[1] in ("o_proj", "down_proj")
        columns = closing and tensor.ndim == 2
        both = torch.cat([own[name] for own in state], 1 if columns else 0)
        kept = "norm" in name or (closing and not columns)
        assert torch.equal(both, torch.cat([tensor, tensor]) if kept else tensor), name


def test_output_is_split_by_its_bytes_unless_told(monkeypatch) -> None:
    ranks, weight = Ranks(World(1, 2, 2)), torch.zeros(64, 8)
    assert Output.of(weight, ranks).weight.shape == (64, 8)
    monkeypatch.setattr("jetspec.engine.parallel.SPLIT_BYTES", 64 * 8 * 4)
    split = Output.of(weight, ranks)
    assert split.weight.shape == (32, 8) and split.first == 32
    assert split.weight.data_ptr() == weight[32:].data_ptr(), "a view: nothing is held twice"
