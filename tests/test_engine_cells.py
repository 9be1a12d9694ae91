"""Cells that the engine decodes: the reference loop's figures, and records that say who decoded."""

from types import SimpleNamespace

import pytest
import torch

from jetspec.decode import DecodeResult, Generation, decode
from jetspec.errors import JetspecError
from jetspec.evaluation.bench import open_engines, run_group
from jetspec.evaluation.budgets import serving_table
from jetspec.evaluation.cells import Cell, cells
from jetspec.evaluation.config import EXACT_DEPTH, EvaluationConfig
from jetspec.evaluation.methods import Request, make_runner
from jetspec.evaluation.output_check import check_outputs
from jetspec.evaluation.report import markdown_table
from tests.measured import FakePrompt, FakeTarget
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.evaluation import engines as engines_module  # noqa: E402
from jetspec.evaluation.engines import Engines  # noqa: E402
from kernels.exact_attention import TAIL  # noqa: E402

CONFIG = EvaluationConfig(
    max_new_tokens=4, warmup_prompts=0, bootstrap_samples=100, width=3, budgets=(3,),
    methods=("plain", "lookup", "chain", "tree"), builders=("best_first", "algorithm1"),
    lookup_depth=2, backend="engine",
)  # fmt: skip
REFERENCE = CONFIG.model_copy(update={"backend": "reference"})
PROMPTS = [FakePrompt("p0", "chat", ({"role": "user", "content": "hi"},))]


@pytest.fixture(scope="module")
def models():
    """Both lean towards token 9, so that some drafts are accepted."""
    target = tiny_target("llama", hidden_size=64, num_layers=1)
    with torch.no_grad():
        target.model.base_model.embed_tokens.weight[:, 0] += 1
        target.model.lm_head.weight[9, 0] += 2
    return target, tiny_head(target, block_size=4, num_layers=1, num_taps=1)


@pytest.fixture(scope="module")
def small_engines(models):
    return Engines(*models, CONFIG, kernels=True, least_rows=128, page_size=16)


@pytest.fixture(scope="module")
def both(models, small_engines):
    """The same matrix by the reference loop and by the engine, its kernels interpreted."""
    target, head = models
    matrix = cells(REFERENCE, ["chat"], head_depth=head.depth)
    theirs = run_group(matrix, target, head, PROMPTS, REFERENCE)
    ours = run_group(matrix, target, head, PROMPTS, CONFIG, engines=small_engines)
    return tuple(
        {r["method"] if r["builder"] != "algorithm1" else r["builder"]: r for r in records}
        for records in (ours, theirs)
    )


@pytest.mark.parametrize("method", ["plain", "lookup", "chain", "tree"])
def test_the_engines_cells_have_the_references_tokens_and_rounds(both, method) -> None:
    ours, theirs = (records[method] for records in both)
    assert (ours["status"], ours["decoder"], theirs["decoder"]) == ("ok", "engine", "reference")
    for name in ("tau", "rounds", "tokens", "acceptance_by_depth"):
        assert ours[name] == theirs[name], name
    assert ours["tau"] > 1 or method in ("plain", "lookup")  # this answer repeats nothing
    assert ours["output_check"]["differing"] == 0 and ours["output_check"]["passed"]
    assert both[0]["plain"]["outputs"] == both[1]["plain"]["outputs"]
    assert ours["speedup"]["vs_plain"]["value"] > 0
    assert ours["tok_s_decode"] > 0 and ours["seconds_per_round"]["total"] > 0


def test_what_the_engine_cannot_decode_is_marked_and_not_compared_with_its_plain(both) -> None:
    ours, theirs = (records["algorithm1"] for records in both)
    assert ours["decoder"] == "reference" and both[0]["hf_eager"]["decoder"] == "transformers"
    assert ours["tau"] == theirs["tau"] and ours["output_check"]["passed"]
    assert ours["speedup"]["vs_plain"]["value"] is None
    assert ours["speedup"]["vs_plain"]["reason"] == "decoded by reference, plain by engine"
    assert ours["speedup"]["vs_hf_eager"]["value"] > 0
    assert theirs["speedup"]["vs_plain"]["value"] > 0
    table = markdown_table(list(both[0].values())).splitlines()
    marked = [line for line in table if " * |" in line]
    assert len(marked) == 1 and "algorithm 1 3" in marked[0]
    assert "*:" not in markdown_table(list(both[1].values()))


def test_a_cell_of_another_decoder_is_not_in_the_serving_table(both) -> None:
    fast = {**both[0]["tree"], "builder": "algorithm1", "decoder": "reference"}
    fast["batches"] = [{**row, "decode_seconds": 1e-9} for row in fast["batches"]]
    (row,) = serving_table([*both[0].values(), fast], hysteresis=0.0)
    assert row["builder"] != "algorithm1"
    (row,) = serving_table([*both[0].values(), {**fast, "decoder": "engine"}], hysteresis=0.0)
    assert row["builder"] == "algorithm1"


class FakeEngine:
    """Counts who was made and with how many rows."""

    made: list = []

    def __init__(self, *args, slots, max_rows, **kwargs) -> None:
        self.made.append((slots, max_rows))

    def prepare(self) -> None:
        pass

    def decode(self, prompts, *, max_new_tokens, **kwargs) -> DecodeResult:
        if max_new_tokens == 13:
            raise torch.OutOfMemoryError("full")
        return DecodeResult([Generation([7], [], []) for _ in prompts], {"prefill": 0.0}, 0)


def test_engines_are_kept_until_batch_temperature_or_length_ask_for_others(models, monkeypatch):
    monkeypatch.setattr(engines_module, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", made := [])
    engines = Engines(*models, CONFIG, kernels=True, least_rows=128, page_size=16)

    def decode(cell, tokens=5, limit=4) -> None:
        engines.runner(cell)([Request([5] * tokens, "p")] * cell.batch_size, limit)

    def tree(batch=1, slice_="chat", temperature=0.0):
        return Cell("tree", "best_first", 3, batch, slice_, temperature)

    plain = Cell("plain", None, 0, 1, "chat", 0.0)
    for cell in (plain, tree(), plain, tree(), tree(slice_="math")):
        decode(cell)
    assert made == [(1, 128)] * 2
    decode(tree(batch=2))
    decode(tree(batch=2, temperature=1.0))
    assert made[2:] == [(2, 128)] * 2
    decode(tree(batch=2, temperature=1.0), tokens=100)
    assert made[4:] == [(2, 256)]
    with pytest.raises(torch.OutOfMemoryError):
        decode(tree(batch=2, temperature=1.0), limit=13)
    decode(tree(batch=2, temperature=1.0))
    assert made[5:] == [(2, 256)], "a broken engine was used again"


def test_engines_that_decode_nothing_need_not_be_made(models, monkeypatch) -> None:
    """Where answers are known, the question which decoder they are from costs nothing."""
    target = models[0]
    with monkeypatch.context() as patch:
        patch.setattr(engines_module, "EngineModel", lambda *_, **__: pytest.fail("made"))
        engines = Engines(target, None, CONFIG, kernels=True, least_rows=0, page_size=16)
        plain = Cell("plain", None, 0, 1, "all", 0.0)
        assert engines.decodes(plain)
    monkeypatch.setattr(engines_module, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", made := [])
    engines.runner(plain)([Request([5] * 5, "p")], 4)
    assert [slots for slots, rows in made if rows >= 9] == [1]


def test_engines_share_weights_with_the_target_and_pages_with_each_other(models, both) -> None:
    """`both` has run: its engines are still there."""
    target, head = models
    engines = Engines(target, head, CONFIG, kernels=True, least_rows=128, page_size=16)
    plain = engines._engine(Cell("plain", None, 0, 1, "chat", 0.0), 5)
    tree = engines._engine(Cell("tree", "best_first", 3, 1, "chat", 0.0), 5)
    assert plain.cache is tree.cache and plain.model is tree.model
    fused = plain.model.layers[0].qkv.untyped_storage().data_ptr()
    own = target.model.base_model.layers[0].self_attn.q_proj.weight
    assert own.untyped_storage().data_ptr() == fused


def test_preparing_captures_each_context_length_once(models, monkeypatch) -> None:
    captured = []
    engine = Engine(models[0], slots=1, max_rows=5000, page_size=1000, kernels=True, graphs=True)
    monkeypatch.setattr(
        engine.graphs, "capture",
        lambda: captured.append(engine.round.max_context) or SimpleNamespace(),
    )  # fmt: skip
    engine.prepare()
    engine.prepare()
    assert captured == [2048, 4096, 5000]


def test_without_a_gpu_the_reference_loop_decodes_and_the_record_says_so(models) -> None:
    engines = open_engines(*models, CONFIG)
    assert engines is not None and open_engines(*models, REFERENCE) is None
    assert not any(engines.decodes(cell) for cell in cells(CONFIG, ["chat"], head_depth=3))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rule": "residual", "temperatures": [1.0], "methods": ["chain"]}, "evaluation.rule"),
        ({"logit_bias": {5: -100.0}}, "evaluation.logit_bias"),
        ({"score": "entropy"}, "evaluation.score"),
        ({"widths": [4, 2]}, "evaluation.widths"),
        ({"width": 33}, "evaluation.width"),
        ({"depth": 65}, "evaluation.depth"),
        ({"budgets": [2000]}, "evaluation.budgets"),
    ],
)
def test_settings_beyond_the_engine_are_refused_in_one_line(settings, field) -> None:
    with pytest.raises(JetspecError, match=f"{field}: .*evaluation.backend") as refused:
        EvaluationConfig(backend="engine", **settings)
    assert "\n" not in str(refused.value)
    assert EvaluationConfig(**settings).backend == "reference"


def test_targets_and_heads_beyond_the_engine_are_refused_before_any_cell(models) -> None:
    def refused(target, head, config=CONFIG, match="evaluation.backend: engine") -> None:
        with pytest.raises(JetspecError, match=match):
            Engines(target, head, config, kernels=True, least_rows=128)

    target = models[0]
    other = tiny_target("llama", hidden_size=64, num_layers=1)
    other.config.model_type = "phi3"
    refused(other, None)
    refused(target, tiny_head(target, block_size=4, conv_rank=2))
    deeper = CONFIG.model_copy(update={"depth": 5})
    refused(target, tiny_head(target, "bidirectional", block_size=4), deeper, "evaluation.depth")


def test_the_default_backend_leaves_the_settings_that_make_keys_as_they_were() -> None:
    assert "backend" not in REFERENCE.model_dump(mode="json")
    assert CONFIG.model_dump(mode="json")["backend"] == "engine"


def test_slot_cells_run_the_same_fused_head_without_its_edges(models, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "prepare", lambda self: None)
    head = tiny_head(models[0], block_size=4, num_layers=1, num_taps=1, edge_rank=2)
    engines = Engines(models[0], head, CONFIG, kernels=True, least_rows=128, page_size=16)
    slot, path = (
        engines._engine(Cell("tree", "best_first", 3, 1, "chat", 0.0, scores), 5)
        for scores in ("slot", "path")
    )
    assert slot.round.head.head.edges is None and path.round.head.head.edges is head.edges
    assert slot.round.head.layers is path.round.head.layers and slot.cache is path.cache
    assert head.edges is not None


def test_shared_answers_fill_the_engines_slots_one_after_another(models) -> None:
    target, head = models
    engines = Engines(target, head, CONFIG, kernels=True, least_rows=128, page_size=16)
    requests = [Request([5 + i] * (3 + i), f"p{i}") for i in range(3)]
    run = engines.runner(Cell("plain", None, 0, 2, "all", 0.0))
    reference = decode(target, [r.input_ids for r in requests], max_new_tokens=3)
    assert run(requests, 3).outputs == [list(g.tokens) for g in reference.generations]


def test_lookup_cells_copy_as_deep_and_match_as_long_as_the_settings_say(models) -> None:
    """Its answer to `hihi` repeats itself; no head is needed."""
    target = models[0]
    config = CONFIG.model_copy(update={"methods": ("lookup",), "lookup_ngram": 2})
    engines = Engines(target, None, config, kernels=True, least_rows=128, page_size=16)
    request = Request(target.render([{"role": "user", "content": "hihi"}]), "p")
    cell = Cell("lookup", "chain", config.lookup_depth, 1, "chat", 0.0)
    ours = engines.runner(cell)([request], 4)
    theirs = make_runner(cell, target, None, config)([request], 4)
    assert (ours.outputs, ours.rounds, ours.accepted, ours.decoder) == (
        theirs.outputs, theirs.rounds, theirs.accepted, "engine",
    )  # fmt: skip
    assert max(ours.accepted[0]) == 1 and theirs.decoder == "reference"
    round_ = engines._engine(cell, 5).round
    assert round_.nodes == 3 and round_.lookup.max_ngram == 2


def test_the_bitwise_mode_is_the_targets_and_the_head_stays_fast(models) -> None:
    config = CONFIG.model_copy(update={"exact": True})
    engines = Engines(*models, config, kernels=True, least_rows=128, page_size=16)
    model, drafts = engines._weights
    assert model.products.exact and not drafts.products.exact
    assert "exact" not in CONFIG.model_dump(mode="json")
    with pytest.raises(JetspecError, match=r"evaluation.exact: .*set backend to engine"):
        EvaluationConfig(exact=True)


@pytest.mark.parametrize(
    ("settings", "name", "levels"),
    [
        ({"methods": ["lookup"], "lookup_depth": 32}, "lookup_depth", 32),
        ({"methods": ["chain"], "depth": 40, "budgets": [16, 36]}, "depth", 36),
        ({"methods": ["tree"], "depth": 40, "budgets": [16]}, "depth", 40),
    ],
)
def test_drafts_too_deep_for_the_bitwise_mode_are_refused_in_one_line(
    settings, name, levels
) -> None:
    assert EXACT_DEPTH == TAIL - 1
    with pytest.raises(JetspecError) as refused:
        EvaluationConfig(backend="engine", exact=True, **settings)
    assert str(refused.value) == (
        f"evaluation.{name}: {levels}: the bitwise mode drafts at most 31 levels; lower it, or "
        "set evaluation.exact to false"
    )
    assert EvaluationConfig(backend="engine", **settings)
    within = {"lookup_depth": 31, "depth": 31}
    assert EvaluationConfig(backend="engine", exact=True, **(settings | within))


def test_a_head_too_deep_for_the_bitwise_mode_is_refused_before_any_cell(models) -> None:
    config = CONFIG.model_copy(update={"exact": True})
    deep = tiny_head(models[0], block_size=40, num_layers=1, num_taps=1)
    with pytest.raises(JetspecError, match=rf"evaluation.depth: {deep.depth}: .*at most 31 levels"):
        Engines(models[0], deep, config, kernels=True, least_rows=0, page_size=16)
    chains = config.model_copy(update={"methods": ("chain",), "budgets": (31,)})
    Engines(models[0], deep, chains, kernels=True, least_rows=0, page_size=16)


@pytest.mark.parametrize(("exact", "other", "passed"), [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_in_the_bitwise_mode_a_near_tie_of_the_engine_is_an_error(exact, other, passed) -> None:
    """Tokens 1 and 2 are tied. What another decoder wrote may still round otherwise."""
    config = CONFIG.model_copy(update={"exact": bool(exact)})
    check = check_outputs(
        FakeTarget(torch.bfloat16), {"p": Request([7, 8], "p")}, {"p": [5, 1]}, {"p": [5, 2]},
        Cell("tree", "best_first", 3, 1, "chat", 0.0), config, other_kernels=bool(other),
    )  # fmt: skip
    assert (check["passed"], check["near_ties"]) == (bool(passed), 1)
    assert check["rule"].startswith("identical") is not bool(passed)
