"""Batched generation and the conversations built on it."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.generation.base import GenerationRequest
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import TokenPrompt, user_turns
from jetspec.generation.transformers_backend import TransformersBackend, complete
from jetspec.sampling import SamplingParams
from tests.tiny import ARCHITECTURES, EOS, tiny_target

GREEDY = SamplingParams()


def prompts(count: int, *, longest: int = 19) -> list[TokenPrompt]:
    """Prompts of many lengths over the tiny vocabulary, each with a seed of its own."""
    generator = torch.Generator().manual_seed(7)
    lengths = [1 + (5 * i) % longest for i in range(count)]
    return [
        TokenPrompt(torch.randint(3, 64, (n,), generator=generator).tolist(), 1000 + i)
        for i, n in enumerate(lengths)
    ]


def request(*contents: str, id: str = "r", seed: int = 5, roles: str = "") -> GenerationRequest:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    roles = roles or "u" * len(contents)
    messages = tuple({"role": names[r], "content": c} for r, c in zip(roles, contents, strict=True))
    return GenerationRequest(id, messages, 0, seed)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_greedy_tokens_do_not_depend_on_batch_neighbours(arch: str) -> None:
    target = tiny_target(arch)
    alone, together = (
        complete(target, prompts(12), sampling=GREEDY, max_new_tokens=24, batch_size=size)
        for size in (1, 8)
    )
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    assert len({tuple(c.tokens) for c in alone}) > 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_the_reference_decoding_loop(temperature: float) -> None:
    target = tiny_target()
    sampling = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0, seed=3)
    given = prompts(5)
    ours = complete(target, given, sampling=sampling, max_new_tokens=20, batch_size=4)
    for prompt, continuation in zip(given, ours, strict=True):
        if temperature:
            expected = _draws_one_by_one(target, prompt, sampling, 20)
        else:
            result = decode(target, [prompt.ids], sampling=sampling, max_new_tokens=20)
            expected = result.generations[0].tokens
        assert continuation.tokens == expected
    assert target.config._attn_implementation == "sdpa"  # as it was


def _draws_one_by_one(target, prompt, sampling, limit):  # type: ignore[no-untyped-def]
    from jetspec.sampling import sample

    ids = list(prompt.ids)
    for _ in range(limit):
        length = len(ids)
        output = target.forward(
            torch.tensor([ids]),
            position_ids=torch.arange(length)[None],
            mask=torch.ones(length, length, dtype=torch.bool).tril()[None],
        )
        logits = target.logits(output.hidden[:, -1])
        keys, positions = torch.tensor([prompt.seed]), torch.tensor([length])
        ids.append(int(sample(logits, sampling, keys, positions)))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt.ids) :]


def test_sampled_tokens_depend_on_the_request_seed_only() -> None:
    target = tiny_target()
    sampling = SamplingParams(temperature=1.0, seed=1)
    same_ids = [TokenPrompt([5, 6, 7], seed) for seed in (1, 2, 1)]
    first, second, third = complete(
        target, same_ids, sampling=sampling, max_new_tokens=16, batch_size=2
    )
    assert first.tokens == third.tokens != second.tokens


def test_a_stop_token_ends_an_answer_and_is_its_last_token() -> None:
    target = tiny_target()
    free = complete(target, prompts(8), sampling=GREEDY, max_new_tokens=12, batch_size=8)
    stop = free[0].tokens[3]
    target.eos_token_ids = frozenset({stop})
    for before, after in zip(
        free,
        complete(target, prompts(8), sampling=GREEDY, max_new_tokens=12, batch_size=3),
        strict=True,
    ):
        cut = before.tokens.index(stop) + 1 if stop in before.tokens else len(before.tokens)
        assert after.tokens == before.tokens[:cut]
        assert after.finish == ("stop" if stop in before.tokens else "length")


def test_steps_queued_past_the_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU looks at the tokens every few steps: what ran on in between must leave no trace."""
    target = tiny_target()
    target.eos_token_ids = frozenset({9, 17, 30})
    args = {"sampling": GREEDY, "max_new_tokens": 13, "batch_size": 3}
    expected = complete(target, prompts(9), **args)
    from jetspec.generation import transformers_backend

    original = transformers_backend._Slots.advance
    monkeypatch.setattr(
        transformers_backend._Slots, "advance", lambda self, steps: original(self, 8)
    )
    assert complete(target, prompts(9), **args) == expected


def test_every_written_token_is_reported_once() -> None:
    target = tiny_target()
    written: list[int] = []
    out = complete(
        target,
        prompts(10),
        sampling=GREEDY,
        max_new_tokens=9,
        batch_size=4,
        on_tokens=written.append,
    )
    assert sum(written) == sum(len(c.tokens) for c in out)


def backend(target, **settings) -> TransformersBackend:  # type: ignore[no-untyped-def]
    return TransformersBackend(RegenerationConfig(**{"max_new_tokens": 8, **settings}), target)


def test_truncated_answer_is_kept_and_says_so() -> None:
    target = tiny_target()
    target.eos_token_ids = frozenset()
    (result,) = backend(target).generate([request("hello")])
    assert result.status == "truncated"
    assert sum(result.loss_mask) == 8 and len(result.loss_mask) == len(result.input_ids)
    assert result.input_ids[:-8] == target.render(request("hello").messages)


def test_a_looping_answer_says_so() -> None:
    target = tiny_target()
    target.eos_token_ids = frozenset()
    target.logits = (
        lambda hidden: torch.nn.functional.one_hot(  # type: ignore[method-assign]
            torch.full(hidden.shape[:-1], 7), 64
        ).float()
    )
    config = RegenerationConfig(max_new_tokens=32)
    (result,) = TransformersBackend(config, target).generate([request("hello")])
    assert result.status == "looping"


def test_a_too_long_prompt_is_skipped_with_its_length() -> None:
    target = tiny_target()
    long, short = backend(target, max_prompt_tokens=12).generate(
        [request("a" * 40, id="long"), request("hi", id="short")]
    )
    assert (long.status, long.input_ids) == ("skipped", [])
    assert "45 tokens, limit 12" in (long.error or "")
    assert short.status in ("ok", "truncated")


def test_prompt_and_answer_never_pass_the_targets_context() -> None:
    target = tiny_target()
    target.config.max_position_embeddings = 40
    (result,) = backend(target).generate([request("a" * 30)])
    assert result.status == "skipped" and "limit 24" in (result.error or "")


# Conversations


class ScriptedTarget:
    """Renders with special tokens; `closing` may rewrite history as thinking templates do."""

    eos_token_ids = frozenset({1})

    def __init__(self, *, rewrites: bool = False) -> None:
        self.rewrites = rewrites

    def render(self, messages, *, add_generation_prompt=True, enable_thinking=False):  # type: ignore[no-untyped-def]
        ids = []
        for message in messages:
            ids += [10 + "sua".index(message["role"][0]), *map(ord, message["content"]), 1, 2]
        if add_generation_prompt:
            ids += [12, 99] if self.rewrites else [12]
        return ids

    def decode_text(self, ids):  # type: ignore[no-untyped-def]
        return "~".join(map(str, ids))  # not what the ids were: tokenising it again would show


def answered(renderer, given, *answers, **settings):  # type: ignore[no-untyped-def]
    from jetspec.generation.base import Continuation
    from jetspec.generation.conversation import answer_all, in_order

    seen, script = [], list(answers)

    def write(batch):  # type: ignore[no-untyped-def]
        seen.extend(p.ids for p in batch)
        return [Continuation(*script.pop(0)) for _ in batch]

    config = RegenerationConfig(**settings)
    (result,) = answer_all(in_order(write), renderer, config, [given], max_prompt_tokens=60)
    return result, seen


def test_answers_reach_their_conversations_in_any_order_and_none_is_missing() -> None:
    from jetspec.generation.base import Continuation
    from jetspec.generation.conversation import answer_all

    def backwards(prompts, take):  # type: ignore[no-untyped-def]
        for place in reversed(range(len(prompts))):
            take(place, Continuation([*prompts[place].ids[:2], 1], "stop"))

    given = [request("p", "q", id="a"), request("r", id="b")]
    settings = RegenerationConfig(), given
    first, second = answer_all(backwards, ScriptedTarget(), *settings, max_prompt_tokens=60)
    assert [m["content"] for m in first.messages if m["role"] == "assistant"] == ["11~112"] * 2
    assert second.messages[-1]["content"] == "11~114"
    with pytest.raises(ValueError, match="2 of 2 prompts"):
        answer_all(lambda *_: None, ScriptedTarget(), *settings, max_prompt_tokens=60)


def test_second_turn_continues_the_exact_ids_of_the_first() -> None:
    result, seen = answered(
        ScriptedTarget(), request("p", "q"), ([500, 501, 1], "stop"), ([502, 1], "stop")
    )
    first = [11, ord("p"), 1, 2, 12]
    between = [2, 11, ord("q"), 1, 2, 12]
    assert seen == [first, [*first, 500, 501, 1, *between]]
    assert result.status == "ok"
    assert result.input_ids == [*first, 500, 501, 1, *between, 502, 1]
    assert result.loss_mask == [0] * 5 + [1] * 3 + [0] * 6 + [1] * 2
    assert [m["content"] for m in result.messages] == ["p", "500~501", "q", "502"]


def test_a_template_that_rewrites_history_counts_the_last_answer_only() -> None:
    renderer = ScriptedTarget(rewrites=True)
    result, seen = answered(renderer, request("p", "q"), ([500, 1], "stop"), ([502, 1], "stop"))
    served = renderer.render(result.messages[:3])
    assert seen[1] == served
    assert result.input_ids == [*served, 502, 1]
    assert result.loss_mask == [0] * len(served) + [1, 1]


def test_a_truncated_turn_ends_the_conversation() -> None:
    result, seen = answered(ScriptedTarget(), request("p", "q"), ([500, 501], "length"))
    assert result.status == "truncated" and len(seen) == 1
    assert len(result.messages) == 2


def test_a_conversation_that_outgrows_the_limit_keeps_its_finished_turns() -> None:
    result, _ = answered(ScriptedTarget(), request("p", "q" * 60), ([500, 1], "stop"))
    assert result.status == "truncated" and "limit 60" in result.error
    assert result.loss_mask == [0] * 5 + [1] * 2


def test_a_failed_turn_fails_the_sample_with_its_reason() -> None:
    result, _ = answered(ScriptedTarget(), request("p"), ([], "error", "server said no"))
    assert (result.status, result.error, result.input_ids) == ("failed", "server said no", [])


def test_a_prompt_the_template_refuses_fails_alone() -> None:
    class Refusing(ScriptedTarget):
        def render(self, messages, **kwargs):  # type: ignore[no-untyped-def]
            raise TypeError("roles must\nalternate")

    result, seen = answered(Refusing(), request("p"))
    assert result.status == "failed" and "TypeError: roles must alternate" in result.error
    assert not seen


def test_turns_all_drops_given_answers_and_last_keeps_them() -> None:
    messages = request("s", "p", "x", "q", roles="suau").messages
    every = user_turns(messages, "all")
    assert [[m["content"] for m in turn] for turn in every] == [["s", "p"], ["q"]]
    (last,) = user_turns((*messages, {"role": "assistant", "content": "y"}), "last")
    assert [m["content"] for m in last] == ["s", "p", "x", "q"]


def test_conversations_that_cannot_be_answered_say_why() -> None:
    for given, reason in [
        (request("x", roles="s"), "no user turn"),
        (request("p", "x", "q", roles="utu"), "role tool"),
    ]:
        result, _ = answered(ScriptedTarget(), given)
        assert result.status == "failed" and reason in result.error


def test_multi_turn_on_a_real_model_feeds_back_its_own_answers() -> None:
    target = tiny_target()
    target.eos_token_ids = frozenset({EOS, *range(20, 50)})
    (result,) = backend(target, max_new_tokens=40).generate([request("hi", "bye")])
    assert result.status == "ok"
    assert [m["role"] for m in result.messages] == ["user", "assistant", "user", "assistant"]
    start = result.loss_mask.index(1)
    assert result.input_ids[:start] == target.render(result.messages[:1])
    second = len(result.loss_mask) - result.loss_mask[::-1].index(0)  # where the last answer begins
    (continued,) = complete(
        target,
        [TokenPrompt(result.input_ids[:second], 0)],
        sampling=GREEDY,
        max_new_tokens=40,
        batch_size=1,
    )
    assert result.input_ids[second:] == continued.tokens


def test_the_engine_backend_without_a_gpu_gives_the_same_greedy_answers() -> None:
    from jetspec.generation.engine_backend import EngineBackend

    target = tiny_target()
    config = RegenerationConfig(backend="engine", batch_size=2, max_new_tokens=8)
    backend, theirs = EngineBackend(config, target), TransformersBackend(config, target)
    written: list[int] = []
    backend.on_tokens = written.append
    requests = [request(f"what is {word}", id=word) for word in ("red", "blue", "green")]
    assert backend.generate(requests) == theirs.generate(requests)
    assert backend.semantics == "engine-float32" and sum(written) > 8


def test_regeneration_runs_on_the_engine_and_names_it(tmp_path) -> None:
    from jetspec.generation.regenerate import regenerate
    from tests.regeneration import make_run, save_target

    target = save_target(tmp_path / "target")
    ours = regenerate(make_run(tmp_path, target, backend="engine"))
    theirs = regenerate(make_run(tmp_path, target))
    assert ours["semantics"] == "engine-float32"
    assert ours["tokens"] == theirs["tokens"] > 0
    assert ours["config_hash"] != theirs["config_hash"]
