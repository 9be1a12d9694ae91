"""Every head x builder x rule x target decodes losslessly, or says in one line why it does not.

Greedy and sample-and-match give plain decoding's text, token by token. The residual rule gives
another draw from the same distribution, which a chi-square test compares with the target's own.
"""

import functools

import pytest
import torch

import jetspec.verify
from jetspec.decode import decode
from jetspec.drafters import DraftModelDrafter, LookupDrafter
from jetspec.errors import JetspecError
from jetspec.heads.base import HEADS
from jetspec.heads.producers import EDGES
from jetspec.heads.registry import MODULES, head_class, new_head
from jetspec.sampling import SamplingParams
from jetspec.trees.build import BUILDERS
from jetspec.trees.config import TreeConfig
from tests.chi_square import LOSSLESS, joint_distribution, p_value
from tests.tiny import ARCHITECTURES, tiny_target

SMALL = {"num_layers": 1, "block_size": 5, "num_taps": 1}
PARALLEL = {"kind": "parallel", **SMALL}
HEADS_OF_THE_MATRIX = {
    "jetspec": PARALLEL,
    "dflash": PARALLEL | {"mask": "bidirectional"},
    "markov": PARALLEL | {"edge_rank": 4},
    "learned rows": PARALLEL | {"edge_rank": 4, "edge_rows": "learned"},
    "context": PARALLEL | {"edges": "context", "edge_rank": 4},
    "selector": PARALLEL | {"edges": "selector", "edge_rank": 4, "conv_rank": 2},
    "lattice": PARALLEL | {"edges": "lattice", "edge_rank": 4, "edge_width": 32, "edge_layers": 1},
    "rescore shared": PARALLEL | {"rescore": "shared", "rescore_nodes": 24},
    "rescore own": PARALLEL | {"rescore": "own", "rescore_nodes": 24},
    "eagle3": {"kind": "eagle3", "block_size": 4, "num_taps": 1, "beam": 3},
    "dspark": {"kind": "dspark", "block_size": 4, "num_layers": 1, "num_taps": 1, "markov_rank": 4},
}
UNTRAINED = ("lookup", "draft model")
DRAFTERS = (*HEADS_OF_THE_MATRIX, *UNTRAINED)
PROMPTS = [[3, 5, 4, 5, 6], [7, 3, 5, 4, 5]]
# A vocabulary of 8 leaves a random head one guess in eight: rounds accept some and reject some.
VOCAB, NEW, DRAWS = 8, 4, 250
SAMPLED = SamplingParams(temperature=1.3, top_p=0.97, repetition_penalty=1.1, seed=5)
DRAWN = SamplingParams(temperature=1.3, seed=5)
FITS = {"residual": ("chain", "static")}


@functools.cache
def target_of(arch):
    return tiny_target(arch, seed=3, vocab_size=VOCAB, hidden_size=16, num_layers=1, spread=0.4)


@functools.cache
def small_model():
    return tiny_target("llama", seed=7, vocab_size=VOCAB, hidden_size=16, num_layers=1)


@functools.cache
def head_of(name, arch):
    raw = HEADS_OF_THE_MATRIX[name] | {"mask_token_id": 0}
    settings = head_class(raw["kind"]).settings
    known = {key: value for key, value in raw.items() if key in settings.model_fields}
    head = new_head(settings.model_validate(known), target_of(arch))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():  # away from zero, where path scores begin
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head.eval()


def drafter_of(name, arch):
    if name == "lookup":
        return LookupDrafter(depth=4)
    if name == "draft model":
        return DraftModelDrafter(small_model(), width=3, depth=3, beam=3)
    return head_of(name, arch).drafter(target_of(arch), width=5)


def tree_of(builder):
    return TreeConfig(builder=builder, budget=6, width=4, rank_rates=(0.4, 0.3, 0.2))


@functools.cache
def plain(arch, params):
    return tokens(arch, PROMPTS, params, drafter=None)


def generations(arch, prompts, params, **settings):
    common = {"max_new_tokens": NEW, "stop_token_ids": (), **settings}
    return decode(target_of(arch), prompts, sampling=params, **common).generations


def tokens(*arguments, **settings):
    return [generation.tokens for generation in generations(*arguments, **settings)]


@functools.cache
def joint(arch):
    return joint_distribution(target_of(arch), PROMPTS[0], DRAWN).double()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rule", ["greedy", "sample_and_match", "residual"])
@pytest.mark.parametrize("builder", [*BUILDERS])
@pytest.mark.parametrize("name", DRAFTERS)
def test_cell(name, builder, rule, arch):
    settings = {"drafter": drafter_of(name, arch), "tree": tree_of(builder), "rule": rule}
    if rule == "greedy":
        assert tokens(arch, PROMPTS, SamplingParams(), **settings) == plain(arch, SamplingParams())
    elif rule == "sample_and_match":
        assert tokens(arch, PROMPTS, SAMPLED, **settings) == plain(arch, SAMPLED)
    elif builder not in FITS[rule]:
        with pytest.raises(
            JetspecError, match="^rule: residual: .*choose chain or static"
        ) as caught:
            tokens(arch, PROMPTS, DRAWN, **settings)
        assert "\n" not in str(caught.value)
    else:
        assert drawn_p_value(arch, settings) > LOSSLESS / 10


def drawn_p_value(arch, settings):
    """The smaller one of tokens (1, 2) and (2, 3) of many requests."""
    drawn = tokens(arch, PROMPTS[:1] * DRAWS, DRAWN, max_new_tokens=3, **settings)
    found, p = torch.tensor(drawn), joint(arch)
    values = []
    for pair, expected in ((found[:, :2], p.sum(2)), (found[:, 1:], p.sum(0))):
        counts = torch.bincount(pair[:, 0] * VOCAB + pair[:, 1], minlength=VOCAB**2)
        values.append(p_value(counts, expected.flatten() * DRAWS))
    return min(values)


@pytest.mark.parametrize("builder", FITS["residual"])
def test_a_cell_of_the_residual_rule_fails_if_nothing_is_taken_from_p(builder, monkeypatch):
    monkeypatch.setattr(jetspec.verify, "_norm", lambda mass, otherwise: otherwise)
    settings = {"drafter": drafter_of("jetspec", "llama"), "tree": tree_of(builder)}
    assert drawn_p_value("llama", settings | {"rule": "residual"}) < LOSSLESS / 10


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_cells_of_a_drafter_accept_and_reject(name):
    accepted = [
        count
        for arch in ("llama", "qwen3")
        for generation in generations(
            arch,
            PROMPTS,
            SamplingParams(),
            drafter=drafter_of(name, arch),
            tree=tree_of("best_first"),
        )
        for count in generation.accepted
    ]
    assert 0 in accepted and max(accepted) > 0


def test_every_head_and_every_producer_is_in_the_matrix():
    kinds = {raw["kind"] for raw in HEADS_OF_THE_MATRIX.values()}
    shipped = {kind for kind, head in HEADS.items() if head.__module__.startswith("jetspec.")}
    assert kinds == {*MODULES} | shipped
    producers = {raw.get("edges") for raw in HEADS_OF_THE_MATRIX.values()} - {None}
    assert producers | {"markov"} == set(EDGES)
