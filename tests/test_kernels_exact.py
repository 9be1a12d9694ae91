"""Bits that depend on a row's own sequence alone: trees, chains, prompts and plain rows agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_kernels_attention import problem
from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
exact = interpreted("kernels.exact_attention")
attention = interpreted("kernels.tree_attention")
tree_build = interpreted("kernels.tree_build")
Plan, Cuts = attention.Plan, exact.Cuts
CUTS = Cuts(32, 2)


def random_tree(seed: int, nodes: int, deepest: int):
    """(parents, depths) long [nodes] in an order in which parents come first."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for _ in range(1, nodes):
        open_ = [node for node, depth in enumerate(depths) if depth < deepest]
        parents.append(open_[int(torch.randint(0, len(open_), (), generator=generator))])
        depths.append(depths[parents[-1]] + 1)
    return torch.tensor(parents), torch.tensor(depths)


def ancestors_of(parents: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return tree_build.list_ancestors(parents, sizes, exact.TAIL)


@pytest.mark.parametrize(
    ("dtype", "prefix"), [(torch.bfloat16, 77), (torch.bfloat16, 0), (torch.float32, 20)]
)
def test_a_node_has_the_bits_of_its_token_decoded_plainly(dtype, prefix) -> None:
    """Every path of a random tree, committed to its places, ends in the node's own bits."""
    nodes, deepest = 24, 9
    parents, depths = random_tree(prefix, nodes, deepest)
    q, keys, values, table, prefixes, _, _ = problem(
        prefix, [prefix], nodes, heads=6, kv_heads=2, head_dim=16, dtype=dtype
    )
    sizes, counts = torch.tensor([nodes]), torch.tensor([nodes], dtype=torch.int32)
    whole = exact.exact_attention(
        q, keys, values, table, prefixes, counts, (prefix + depths).int(),
        ancestors_of(parents[None], sizes), max_context=128, plan=Plan(32, 16, 4, 2), cuts=CUTS,
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.int32)
    for node in range(0, nodes, 5):
        path, here = [], node
        while here >= 0:
            path.insert(0, here)
            here = int(parents[here])
        moved_keys, moved_values = keys.clone(), values.clone()
        for depth, source in enumerate(path):
            for cache, moved in ((keys, moved_keys), (values, moved_values)):
                rows = [divmod(prefix + step, 16) for step in (source, depth)]
                (page, at), (to_page, to) = ((int(table[0, p]), o) for p, o in rows)
                moved[to_page, :, to] = cache[page, :, at]
        place = torch.tensor([prefix + int(depths[node])], dtype=torch.int32)
        alone = exact.exact_attention(
            q[:, node : node + 1].contiguous(), moved_keys, moved_values, table, place, one, place,
            None, max_context=96, plan=Plan(16, 16, 4, 2), cuts=CUTS,
        )  # fmt: skip
        assert torch.equal(alone[0, 0], whole[0, node])


def test_trees_equal_the_dense_reference() -> None:
    q, keys, values, table, prefixes, _, _ = problem(
        5, [70, 3], 20, heads=4, kv_heads=2, head_dim=16
    )
    trees = [random_tree(seed, 20, 6) for seed in (1, 2)]
    parents, depths = (torch.stack(part) for part in zip(*trees, strict=True))
    sizes = torch.tensor([20, 13])
    counts = sizes.int()
    found = exact.exact_attention(
        q, keys, values, table, prefixes, counts, (prefixes[:, None] + depths).flatten().int(),
        ancestors_of(parents, sizes), max_context=96, plan=Plan(32, 16, 4, 2), cuts=CUTS,
    )  # fmt: skip
    bits = tree_build.pack_ancestors(parents, sizes, 6)
    expected = reference.tree_attention(q, keys, values, table, prefixes, counts, bits)
    assert (found - expected).abs().max() < 2e-6


@pytest.mark.parametrize("nodes", [1, 40])
def test_causal_rows_equal_the_dense_reference_and_each_other_in_chunks(nodes) -> None:
    q, keys, values, table, prefixes, counts, _ = problem(
        6, [50, 9], nodes, heads=4, kv_heads=1, head_dim=16
    )
    counts[1] = 1
    order = (prefixes[:, None] + torch.arange(nodes)).flatten().int()
    options = {"max_context": 96, "plan": Plan(64, 16, 4, 2), "cuts": CUTS}
    found = exact.exact_attention(q, keys, values, table, prefixes, counts, order, None, **options)
    expected = reference.tree_attention(q, keys, values, table, prefixes, counts, None)
    assert (found - expected).abs().max() < 2e-6
    if nodes > 1:  # the second half alone, behind the first
        later = exact.exact_attention(
            q[:1, 20:].contiguous(), keys, values, table[:1], prefixes[:1] + 20,
            torch.tensor([20], dtype=torch.int32), order[20:40], None, **options,
        )  # fmt: skip
        assert torch.equal(later[0], found[0, 20:])


def test_cuts_lie_at_fixed_positions_and_cover_every_length() -> None:
    cuts = Cuts(256, 8)
    ends = [0]
    for length in range(1, 70000, 37):
        used = cuts.used(length)
        while len(ends) <= used:
            size = 256 << max(len(ends) - 1 - 8, 0) // 8
            ends.append(ends[-1] + size)
        assert ends[used - 1] < length <= ends[used]
    assert cuts.used(32768) == 40


def test_ancestors_are_listed_from_the_row_up() -> None:
    parents = torch.tensor([[-1, 0, 1, 0, -1]])
    listed = tree_build.list_ancestors(parents, torch.tensor([4]), 3)
    assert listed[0].tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 0, -1], [-1, -1, -1]]


# Compiled for Hopper without the interpreter, which knows no layouts.
COMPILED = r"""
import json
import re

import torch
from kernels import aot, exact_attention, experts, fp8_gemm, launch, norms, rope, small_gemm

launch._hopper = lambda: True  # compiled as on the card


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def recorded(module, name):
    recorder = aot.Recorder(getattr(module, name))
    setattr(module, name, recorder)
    return recorder.compiled


# Where the summands of each reduction and product lie, in the order of the program.
def sums(compiled):
    ir = compiled.asm["ttgir"]
    pattern = r'"tt.reduce".*?[}][)] : [(](.*?)[)] ->|(?:_group_dot|tt.dot) .*? : (.*?)$'
    found = "; ".join(a or b for a, b in re.findall(pattern, ir, re.S | re.M))
    found = "; ".join(re.findall("tensor<[^>]*>", found))  # not where operands wait in memory
    for name, layout in re.findall(r"^(#\w+) = (.*)$", ir, re.M):
        found = re.sub(name + r"\b", layout, found)
    return found


def instructions(compiled):
    return re.findall(r"(\w*mma)\S*?m\d+n\d+(k\d+)", compiled.asm["ptx"])


launches = {
    name: recorded(module, name)
    for module, name in (
        (exact_attention, "_attend_committed"), (exact_attention, "_finish"),
        (norms, "_add_rms_norm"), (rope, "_qkv_to_cache"), (experts, "_route"),
    )
}
for batch, nodes in ((1, 1), (1, 16), (30, 1)):  # each has a plan of its own
    cache = bf16(4, 2, 64, 64)
    exact_attention.exact_attention(
        bf16(batch, nodes, 14, 64), cache, cache, ints(batch, 32), ints(batch), ints(batch),
        ints(batch * nodes), None, max_context=2048,
    )
for rows in (1, 3, 16):
    norms.add_rms_norm(torch.empty(4, rows, 896), bf16(rows, 896), bf16(896), 1e-6)
    cache, places = bf16(4, 8, 64, 128), ints(rows)
    rope.qkv_to_cache(
        torch.empty(2, rows, 6144), cache, cache, torch.empty(64, 128), places, places.long(),
        heads=32, q_norm=bf16(128), k_norm=bf16(128),
    )
    experts.route(torch.empty(4, rows, 128), 8, normalise=True, like=bf16(1, 1))
products = [
    recorded(small_gemm, "_product"), recorded(fp8_gemm, "_fp8_product"),
    recorded(experts, "_expert_product"),
]
for rows in (17, 33, 65):
    small_gemm.small_gemm(bf16(rows, 896), bf16(1152, 896))
    values = torch.empty(1152, 896, dtype=torch.float8_e4m3fn)
    fp8_gemm.fp8_gemm(bf16(rows, 896), values, torch.empty(1152, dtype=torch.int8))
for rows in (400, 1200):
    experts.first_product(
        bf16(rows, 256), bf16(128, 64, 256), ints(128, rows), ints(128), torch.empty(rows, 8)
    )
print(json.dumps([
    {name: [sums(compiled) for compiled in found] for name, found in launches.items()},
    [instructions(compiled) for found in products for compiled in found],
]))
"""


def test_no_number_of_rows_lays_sums_out_otherwise() -> None:
    """A reduction's order is its layout's; a product's along K is its instruction's."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1], env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    sums, products = json.loads(done.stdout.splitlines()[-1])
    for name, launches in sums.items():
        assert len(launches) == 3 and launches[0].count("tensor<") > 0, name
        assert len(set(launches)) == 1, name
    assert len(products) == 8
    for instructions in products:
        assert {tuple(instruction) for instruction in instructions} == {("wgmma", "k16")}
