import random

import pytest

from jetspec.leaks import find_leaks, units_of
from jetspec.prompts import Prompt, make_prompt

WORDS = [f"w{i}" for i in range(300)]


def ask(*texts: str) -> Prompt:
    """A conversation of user turns with an answer between them."""
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "Fine."}]
    return make_prompt(messages[:-1], "slice", "test")


def leaks(train: str | Prompt, held_out: str | Prompt) -> tuple[int, int]:
    prompts = [p if isinstance(p, Prompt) else ask(p) for p in (train, held_out)]
    report = find_leaks(prompts[:1], prompts[1:])
    assert report.dropped == ((prompts[0].id,) if report.exact + report.runs else ())
    return report.exact, report.runs


NONE, EXACT, RUN = (0, 0), (1, 0), (0, 1)


@pytest.mark.parametrize(
    "other",
    ["What is 2+2?", "what is 2 + 2", "  WHAT is\n2+2 ??", "What is ２+２?"],
)
def test_equal_but_for_case_space_punctuation_and_width_is_exact(other):
    assert leaks(other, "What is 2+2?") == EXACT


def test_a_different_question_is_no_leak():
    assert leaks("What is 2+3?", "What is 2+2?") == NONE


def test_ten_shared_words_are_a_run_and_nine_are_not():
    shared = WORDS[:10]
    assert leaks(" ".join(["x", *shared, "y"]), " ".join(["u", *shared, "v"])) == RUN
    assert leaks(" ".join(["x", *shared[1:], "y"]), " ".join(["u", *shared[1:], "v"])) == NONE


def test_a_run_survives_case_and_punctuation():
    shared = "The quick brown fox jumps over the very lazy dog"
    assert leaks(f"Translate: {shared.upper()}!", f"Why does ({shared}) scan?") == RUN


def test_the_same_words_in_another_order_are_no_run():
    assert leaks(" ".join(WORDS[:12]), " ".join(WORDS[:12][::-1])) == NONE


def test_fifteen_chinese_characters_are_a_run_and_fourteen_are_not():
    shared = "小明有三个苹果他又买了五个梨子"
    assert len(shared) == 15
    assert leaks(f"请问：{shared}，一共？", f"已知{shared}。求总数") == RUN
    assert leaks(f"请问：{shared[:14]}，一共？", f"已知{shared[:14]}。求总数") == NONE


def test_chinese_punctuation_does_not_hide_a_run():
    assert (
        leaks("甲：小明有三个苹果，他又买了五个梨子！", "乙小明有三个苹果他又买了五个梨子丙") == RUN
    )


def test_words_and_characters_add_up_in_mixed_text():
    shared = "写一个函数 binary_search 返回 sorted list 的下标"  # 10 characters and 4 words
    assert len(units_of(shared)) == 14
    assert leaks(f"请{shared}", f"帮我{shared}吧") == RUN
    shorter = "写一个函数 search 返回下标"  # 9 characters and 1 word
    assert leaks(f"请{shorter}", f"帮我{shorter}吧") == NONE


def test_a_run_does_not_cross_turns():
    assert leaks(ask(" ".join(WORDS[:6]), " ".join(WORDS[6:12])), " ".join(WORDS[:12])) == NONE


def test_a_run_in_any_user_turn_counts_and_answers_do_not():
    shared = " ".join(WORDS[:12])
    assert leaks(ask("hello", f"and {shared}"), ask("hi", "so", f"well {shared}")) == RUN
    answered = make_prompt(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": shared},
            {"role": "user", "content": "b"},
        ],
        "s",
        "t",
    )
    assert leaks(answered, shared) == NONE


def test_a_polite_later_turn_of_an_evaluation_prompt_is_not_a_question():
    held_out = ask("How far is the moon?", "Thanks!")
    assert leaks(ask("Name a fruit.", "Thanks!"), held_out) == NONE
    assert leaks(ask("Name a fruit.", "How far is the moon?"), held_out) == EXACT


TEMPLATE = "Please reason step by step, and put your final answer within \\boxed{}."


def questions(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(count)]


def test_a_common_wording_is_not_a_leak():
    held_out = [ask(f"{q}\n{TEMPLATE}") for q in questions(40, 1)]
    train = [ask(f"{q}\n{TEMPLATE}") for q in questions(40, 2)]
    report = find_leaks(train, held_out)
    assert report.dropped == ()
    assert report.wordings >= 3


def test_a_leak_behind_a_common_wording_is_found():
    asked = questions(40, 1)
    held_out = [ask(f"{q}\n{TEMPLATE}") for q in asked]
    train = [ask(f"{TEMPLATE} {asked[7]}"), ask(f"Now then: {asked[9]} {TEMPLATE}")]
    report = find_leaks(train, held_out)
    assert (report.exact, report.runs) == (1, 1)


def test_a_short_question_is_compared_without_its_wording():
    held_out = [ask(f"What is {n}+{n}?\n{TEMPLATE}") for n in range(12)]
    report = find_leaks([ask("What is 7+7?"), ask("What is 7+8?")], held_out)
    assert report.exact == 1 and report.runs == 0


def test_a_small_set_s_wording_is_recognised_too():
    held_out = [ask(f"{q}\n{TEMPLATE}") for q in questions(4, 1)]
    assert find_leaks([ask(f"{questions(1, 2)[0]}\n{TEMPLATE}")], held_out).dropped == ()
    # With two evaluation prompts nothing tells a wording from a shared question.
    assert find_leaks([ask(f"{questions(1, 2)[0]}\n{TEMPLATE}")], held_out[:2]).runs == 1


def test_runs_agree_with_brute_force():
    rng = random.Random(0)
    vocabulary = [*WORDS[:3], *"一二三"]
    train = [ask(" ".join(rng.choices(vocabulary, k=rng.randint(1, 40)))) for _ in range(60)]
    held_out = [ask(" ".join(rng.choices(vocabulary, k=rng.randint(1, 40)))) for _ in range(9)]
    # A shared core in three of the pairs makes sure that runs occur.
    core = " ".join(rng.choices(vocabulary, k=18))
    held_out[0] = ask(f"w9 {core}")
    train[3], train[8] = ask(f"{core} w8"), ask(f"w7 {core} w7")

    def windows(prompt: Prompt) -> set[tuple[str, ...]]:
        units = units_of(prompt.messages[0]["content"])
        weights = [2 if unit in "一二三" else 3 for unit in units]
        found = set()
        for start in range(len(units)):
            for stop in range(start + 1, len(units) + 1):
                if sum(weights[start:stop]) >= 30:
                    found.add(tuple(units[start:stop]))
                    break
        return found

    counts: dict[tuple[str, ...], int] = {}
    for prompt in held_out:
        for run in windows(prompt):
            counts[run] = counts.get(run, 0) + 1
    assert max(counts.values()) < 5  # no wording: the comparison below need not cut any
    expected = {p.id for p in train if windows(p) & set(counts)}
    report = find_leaks(train, held_out)
    assert set(report.dropped) == expected >= {train[3].id, train[8].id}
    assert report.checked == 60


def test_nothing_to_compare():
    assert find_leaks([], []).dropped == ()
    assert find_leaks([ask("a")], []).dropped == ()
    assert find_leaks([], [ask("a")]).dropped == ()
    assert find_leaks([ask("?!")], [ask("...")]).dropped == ()


def test_the_report_is_plain_json_in_order():
    train = [ask("b"), ask("c"), ask("a")]
    report = find_leaks(train, [ask("a"), ask("b")])
    assert report.facts() == {
        "checked": 3,
        "exact": 2,
        "runs": 0,
        "dropped": [train[0].id, train[2].id],
        "wordings": 0,
    }
