"""Prompt lookup and the history it reads, in the interpreter: brute force, reference, drafter."""

import random

import pytest
import torch

from jetspec.drafters import LookupDrafter
from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
lookup = interpreted("kernels.lookup")
commit = interpreted("kernels.commit")

CAPACITY = 48


def copied(text: list[int], ngram: int, depth: int) -> list[int]:
    """The draft by trying every length and place, longest and last first; empty without a match."""
    for length in range(min(ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                grown = list(text)
                for place in range(end, end + depth):
                    grown.append(grown[place])
                return grown[len(text) :]
    return []


def texts(draw: random.Random, count: int) -> list[list[int]]:
    """Texts of 1 to CAPACITY tokens: random ones, ones that go in circles, full memories."""
    found = []
    for _ in range(count):
        length = draw.choice([1, 2, 3, draw.randint(4, CAPACITY), CAPACITY])
        vocabulary = draw.choice([1, 2, 3, 8, 100])
        text = [draw.randrange(vocabulary) for _ in range(length)]
        if draw.random() < 0.3:
            period = draw.randint(1, length)
            text = [text[place % period] for place in range(length)]
        found.append(text)
    return found


def padded(rows: list[list[int]], seed: int) -> torch.Tensor:
    """Behind each text stands what may not be read: more of its own tokens."""
    draw = random.Random(seed)
    return torch.tensor(
        [text + draw.choices(text, k=CAPACITY - len(text)) for text in rows], dtype=torch.int32
    )


@pytest.mark.parametrize("seed", range(5))
def test_lookup_copies_what_brute_force_the_reference_and_the_drafter_copy(seed, monkeypatch):
    """A thousand texts in ragged batches, in steps shorter than most of them."""
    monkeypatch.setattr(lookup, "STEP", 16)
    draw, found = random.Random(seed), 0
    for batch in (100, 80, 17, 3):
        rows = texts(draw, batch)
        ngram, depth = draw.choice([1, 2, 3, 3, 7, 60]), draw.choice([1, 2, 5, 10])
        history = padded(rows, seed)
        prefix = torch.tensor([len(text) - 1 for text in rows], dtype=torch.int32)
        limits = torch.tensor([draw.randint(1, 12) for _ in rows])
        ours = lookup.look_up(history, prefix, limits, ngram=ngram, depth=depth)
        theirs = reference.look_up(history, prefix, limits, ngram=ngram, depth=depth)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        expected = [copied(text, ngram, depth) for text in rows]
        assert ours[0].tolist() == [
            [text[-1], *(draft or [0] * depth)] for text, draft in zip(rows, expected, strict=True)
        ]
        assert ours[1].tolist() == [
            1 + min(len(draft), limit)
            for draft, limit in zip(expected, limits.tolist(), strict=True)
        ]
        draft = LookupDrafter(max_ngram=ngram, depth=depth).propose(ours[0][:, 0], rows)
        exists = draft.edge_scores[:, 0, 0, 0] > -torch.inf
        assert exists.tolist() == [bool(draft) for draft in expected]
        assert torch.equal(draft.tokens[exists, :, 0], ours[0][exists, 1:])
        found += int(exists.sum())
    assert 50 < found < 150


def test_a_step_of_the_usual_size_reads_long_texts() -> None:
    """The only match of three tokens ends 5,000 tokens back; later ones are shorter."""
    text = [7, 8, 9, 1, 2, *range(100, 5096), 6, 9, 3, 8, 9, 4, 7, 8, 9]
    history = torch.tensor([text], dtype=torch.int32)
    prefix = torch.tensor([len(text) - 1], dtype=torch.int32)
    tokens, sizes = lookup.look_up(history, prefix, torch.tensor([9]), ngram=3, depth=3)
    assert tokens.tolist() == [[9, 1, 2, 100]] and sizes.tolist() == [4]


def test_a_round_leaves_its_tokens_in_the_history() -> None:
    """Up to the memory's last place; an idle sequence's text stays as it is."""
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    path = torch.tensor([[0, 2, 3], [0, -1, -1], [0, 1, -1]])
    lengths, bonus = torch.tensor([3, 1, 0]), torch.tensor([91, 92, 93])
    table = torch.zeros(3, 2, dtype=torch.int32)
    prefix = torch.tensor([4, 1, 0], dtype=torch.int32)
    history = torch.full((3, 8), 5, dtype=torch.int32)
    longs = torch.zeros(3, dtype=torch.long)
    commit.advance(
        tokens, path, lengths, bonus, table, 8, prefix, longs, longs[:, None].clone(),
        torch.zeros(3, 4, dtype=torch.long), history,
    )  # fmt: skip
    assert history.tolist() == [
        [5, 5, 5, 5, 5, 12, 13, 91],
        [5, 5, 92, 5, 5, 5, 5, 5],
        [5] * 8,
    ]
    assert prefix.tolist() == [7, 2, 0]
