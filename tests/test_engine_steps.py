"""The engine's bookkeeping against the reference loop's, with a scripted device: no kernel runs."""

import random
from types import SimpleNamespace

import pytest
import torch

from jetspec.decode import Generation, Sequel
from jetspec.errors import JetspecError
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine import prefill  # noqa: E402
from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.engine.paged_cache import PagedCache  # noqa: E402

DEPTH, SLOTS, LIMIT = 3, 4, 9
CHAIN = TreeConfig(builder="chain", depth=DEPTH, budget=DEPTH, width=4)


class Script:
    """What the device will commit: for every prompt its anchor, then rounds of 1 to 4 tokens."""

    def __init__(self, seed: int, count: int, vocabulary: int) -> None:
        draw = random.Random(seed)
        self.prompts = [[index] * draw.randint(1, 20) for index in range(count)]
        self.anchors = [draw.randrange(vocabulary) for _ in range(count)]
        self.rounds = [
            [
                [draw.randrange(vocabulary) for _ in range(draw.randint(1, DEPTH + 1))]
                for _ in range(LIMIT)
            ]
            for _ in range(count)
        ]

    def expected(self, stops: frozenset[int], limit: int) -> list[Generation]:
        """As `jetspec.decode.commit` counts."""
        found = []
        for anchor, rounds in zip(self.anchors, self.rounds, strict=True):
            sequel, rounds = Sequel([]), iter(rounds)
            sequel.extend([anchor], stops, limit)
            while not sequel.generation.finish:
                tokens = next(rounds)
                sequel.generation.rounds.append(sequel.extend(tokens, stops, limit))
                sequel.generation.accepted.append(len(tokens) - 1)
            found.append(sequel.generation)
        return found


@pytest.fixture(scope="module")
def models():
    target = tiny_target(num_layers=1)
    return target, tiny_head(target, block_size=4)


def play(monkeypatch, models, script: Script, ahead: int) -> Engine:
    """An engine whose device follows the script, from the state alone, as the kernels do."""
    engine = Engine(
        *models, tree=CHAIN, slots=SLOTS, max_rows=64, page_size=4, kernels=True, graphs=False,
        ahead=ahead,
    )  # fmt: skip
    state, vocabulary = engine.state, models[0].vocab_size
    place = {}  # slot -> (prompt, its next round)

    def read(_, cache, prompts, lengths, table):
        assert lengths.tolist() == [len(prompt) for prompt in prompts]
        anchors = torch.tensor([script.anchors[prompt[0]] for prompt in prompts])
        return torch.nn.functional.one_hot(anchors, vocabulary)

    def launch():
        state.out.random_(0, vocabulary)  # beyond a round's length anything may stand
        for slot in range(SLOTS):
            if not state.active[slot]:
                state.out[slot, 0] = 0
                continue
            prompt = int(state.keys[slot])
            start, at = place.get(slot, (None, 0))
            at = at if start == prompt else 0
            assert at or int(state.anchors[slot]) == script.anchors[prompt]
            tokens = script.rounds[prompt][min(at, LIMIT - 1)]
            state.out[slot, 0] = len(tokens)
            state.out[slot, 1 : 1 + len(tokens)] = torch.tensor(tokens)
            state.anchors[slot] = tokens[-1]
            rows = int(state.prefix[slot]) + engine.round.nodes
            held = engine.cache.table[slot, : -(-rows // 4)].tolist()
            assert len(set(held)) == len(held), "a round's rows share a page"
            state.prefix[slot] += len(tokens)
            place[slot] = (prompt, at + 1)

    monkeypatch.setattr("jetspec.engine.engine.read_prompts", read)
    monkeypatch.setattr(
        "jetspec.engine.engine.request_keys", lambda ids, device: torch.tensor(list(ids))
    )
    monkeypatch.setattr(engine.model, "logits", lambda hidden: hidden)
    monkeypatch.setattr(engine, "launch", launch)
    return engine


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_answers_rounds_and_ends_are_the_reference_loops(monkeypatch, models, ahead) -> None:
    """Stops inside a round, as an anchor and at the limit; several slots that end at once."""
    ends = set()
    for seed, limit in enumerate([LIMIT, LIMIT, 2, 1]):
        script = Script(seed, count=25, vocabulary=30)
        stops, written = frozenset({3, 4, 29}), []
        engine = play(monkeypatch, models, script, ahead)
        done = engine.decode(
            script.prompts, max_new_tokens=limit, stop_token_ids=stops, on_tokens=written.append
        ).generations
        assert done == script.expected(stops, limit)
        assert sum(written) == sum(len(generation.tokens) for generation in done)
        assert engine.cache.free_pages == engine.cache.pages and engine.cache.fits(64 * SLOTS)
        assert not engine.state.active.any()
        for g in done:
            cut = bool(g.rounds) and g.rounds[-1] <= g.accepted[-1]
            ends.add((g.finish, len(g.tokens) == limit, cut, bool(g.rounds)))
    assert {("stop", False, True, True), ("stop", False, False, False)} <= ends
    assert {("stop", True, True, True), ("length", True, True, True)} <= ends


def test_prompts_of_like_length_are_read_in_one_pass(monkeypatch, models) -> None:
    """A pass pads to its longest prompt."""
    script = Script(2, count=25, vocabulary=30)
    engine = play(monkeypatch, models, script, ahead=1)
    admit, read = engine._admit, []
    monkeypatch.setattr(
        engine, "_admit", lambda group, job: (read.extend(group.values()), admit(group, job))
    )
    engine.decode(script.prompts, max_new_tokens=LIMIT, stop_token_ids=[3])
    lengths = [len(script.prompts[prompt]) for prompt in read]
    assert lengths == sorted(map(len, script.prompts), reverse=True) and len(set(lengths)) > 5


@pytest.mark.parametrize(("longest", "rows"), [(1, 16), (16, 16), (17, 32), (531, 544)])
def test_a_pass_has_a_multiple_of_sixteen_rows_a_prompt(monkeypatch, longest, rows) -> None:
    """Triton compiles sizes that 16 divides apart from others; in a chunk they all are."""
    placed = []

    def place(prefix, active, table, page_size, nodes, sizes):
        placed.append((nodes, active.tolist()))
        raise StopIteration

    monkeypatch.setattr(prefill, "place_rows", place)
    prompts = [[1] * longest, [1]]
    with pytest.raises(StopIteration):
        table = torch.zeros(2, 9, dtype=torch.int32)
        cache = SimpleNamespace(page_size=64)
        prefill.read_prompts(None, cache, prompts, torch.tensor([longest, 1]), table)
    (nodes, counts) = placed[0]
    assert nodes == min(rows, prefill.PREFILL_CHUNK) and counts == [min(longest, 512), 1]
    assert prefill._padded(prompts, 16).shape == (2, rows)


def test_a_prompts_anchor_is_not_waited_for(monkeypatch, models) -> None:
    """The round behind a prefill is enqueued before the host has read any token."""
    engine = play(monkeypatch, models, Script(0, count=2, vocabulary=30), ahead=1)
    order = []
    for name in ("_admit", "_fly", "_land"):
        call = getattr(engine, name)
        monkeypatch.setattr(
            engine, name, lambda *a, name=name, call=call: (order.append(name), call(*a))[1]
        )
    anchors = torch.nn.functional.one_hot(torch.tensor([7, 9]), 64)
    monkeypatch.setattr("jetspec.engine.engine.read_prompts", lambda *_: anchors)
    monkeypatch.setattr(engine, "launch", lambda: None)
    for read in ("tolist", "item", "__int__", "__bool__", "cpu"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_: pytest.fail("the host waited"))
    done = engine.decode([[0], [1]], max_new_tokens=1, stop_token_ids=[9]).generations
    assert order == ["_admit", "_fly", "_fly", "_land"]
    assert [(g.tokens, g.finish) for g in done] == [([7], "length"), ([9], "stop")]


def test_answers_are_handed_over_once_each_while_the_next_round_runs(monkeypatch, models) -> None:
    script, order = Script(3, count=9, vocabulary=30), []
    engine = play(monkeypatch, models, script, ahead=1)
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda: (order.append("round"), launch())[1])
    answers = {}

    def keep(prompt, generation) -> None:
        assert prompt not in answers
        answers[prompt] = generation
        order.append(prompt)

    done = engine.decode(script.prompts, max_new_tokens=5, stop_token_ids=[3], on_answer=keep)
    assert [answers[prompt] for prompt in range(9)] == done.generations
    assert done.generations == script.expected(frozenset({3}), 5)
    rounds_before = order.index(next(event for event in order if event != "round"))
    ended_in = max(len(answers[order[rounds_before]].rounds), 1)
    assert rounds_before == ended_in + 2, "one was under way when it ended, and one more went off"


def test_many_slots_take_pages_as_single_ones_do() -> None:
    draw = random.Random(5)
    one, all_ = (
        PagedCache(
            layers=1, slots=3, max_rows=40, kv_heads=1, head_dim=1, page_size=8,
            dtype=torch.float32, device=torch.device("cpu"), pages=12,
        )
        for _ in range(2)
    )  # fmt: skip
    for _ in range(200):
        slots = torch.tensor(sorted(draw.sample(range(3), 2))).numpy()
        rows = torch.tensor([draw.randint(0, 32), draw.randint(0, 32)]).numpy()
        for slot, wanted in zip(slots, rows, strict=True):
            one.resize(int(slot), int(wanted))
        all_.resize_all(slots, rows)
        one.upload()
        all_.upload()
        assert one.free_pages == all_.free_pages and torch.equal(one.table, all_.table)
    with pytest.raises(JetspecError, match="raise max_rows"):
        all_.resize_all(slots, rows + 40)
