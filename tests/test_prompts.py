import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetspec.config import parse_config
from jetspec.errors import JetspecError
from jetspec.prompt_presets import PRESETS
from jetspec.prompts import (
    Prompt,
    PromptsConfig,
    PromptSource,
    balanced,
    load_prompts,
    load_source,
    make_prompt,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def load(path: object, **settings: object) -> list[Prompt]:
    return load_source(PromptSource.model_validate({"source": str(path), **settings}))


def refusal(path: object, **settings: object) -> str:
    with pytest.raises(JetspecError) as caught:
        load(path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    return line


# The bundled set


def test_the_bundled_set_has_both_splits_in_every_slice():
    prompts = load_prompts(PromptsConfig())
    slices = ["chat", "chat_zh", "code", "code_zh", "math", "math_zh"]
    assert prompts.slices() == slices
    assert sorted({p.slice for p in prompts.train}) == slices
    assert len(prompts.train) + len(prompts.eval) >= 300
    assert prompts.leaks.dropped == () and prompts.duplicates == 0
    assert {p.id for p in prompts.train}.isdisjoint(p.id for p in prompts.eval)


def test_the_bundled_set_is_the_same_every_time():
    assert load_prompts(PromptsConfig()) == load_prompts(PromptsConfig())


# Rows


def test_every_way_to_write_a_prompt_gives_the_same_prompt(tmp_path):
    rows = [
        {"messages": [user("Why?")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
        {"messages": [user("Why?"), assistant("Because.")]},
        {"messages": [{"role": "system", "content": ""}, user("Why?")]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        {"prompt": "Why?"},
        {"prompt": [user("Why?")]},
        {"question": "Why?", "answer": "So."},
    ]
    prompts = load(write(tmp_path / "a.jsonl", *rows))
    assert {p.id for p in prompts} == {make_prompt([user("Why?")], "x", "y").id}
    assert all(p.messages == (user("Why?"),) for p in prompts)


def test_earlier_turns_are_kept_and_the_last_answer_is_not(tmp_path):
    turns = [user("a"), assistant("b"), user("c"), assistant("d")]
    (prompt,) = load(write(tmp_path / "a.jsonl", {"messages": turns}))
    assert prompt.messages == tuple(turns[:3])
    (prompt,) = load(
        write(tmp_path / "b.jsonl", {"messages": [{"role": "system", "content": "s"}, user("a")]})
    )
    assert [m["role"] for m in prompt.messages] == ["system", "user"]


def test_an_id_is_a_hash_of_the_messages_alone(tmp_path):
    a, b, c = load(
        write(
            tmp_path / "a.jsonl",
            {"id": "1", "slice": "s", "prompt": "one"},
            {"id": "2", "domain": "t", "prompt": "one"},
            {"id": "1", "slice": "s", "prompt": "two"},
        )
    )
    assert a.id == b.id != c.id
    assert len(a.id) == 12 and int(a.id, 16) >= 0
    assert (a.slice, b.slice) == ("s", "t")


def test_a_slice_comes_from_the_row_the_setting_or_the_file_s_name(tmp_path):
    path = write(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "b", "slice": "math"})
    assert [p.slice for p in load(path)] == ["mine", "math"]
    assert [p.slice for p in load(path, slice="all")] == ["all", "all"]


def test_blank_lines_and_other_scripts_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "为什么天是蓝的？"}\n\n', encoding="utf-8")
    assert load(path)[0].messages == (user("为什么天是蓝的？"),)


def test_only_the_asked_split_of_a_file_is_read(tmp_path):
    path = write(
        tmp_path / "a.jsonl", {"prompt": "a", "split": "train"}, {"prompt": "b", "split": "eval"}
    )
    assert [p.messages[0]["content"] for p in load(path, split="eval")] == ["b"]
    assert len(load(path)) == 2
    assert "split 'test'" in refusal(path, split="test")


# Files


def test_gzip_parquet_directories_globs_and_other_storage(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "one"}) + "\n")
    messages = pa.array([[user("two")], [user("three"), assistant("x")]])
    pq.write_table(pa.table({"messages": messages, "other": [1, 2]}), tmp_path / "b.parquet")
    (tmp_path / "notes.txt").write_text("not prompts")

    def texts(uri: object) -> list[str]:
        return [p.messages[0]["content"] for p in load(uri)]

    assert texts(tmp_path / "a.jsonl.gz") == ["one"]
    assert texts(tmp_path / "b.parquet") == ["two", "three"]
    assert texts(tmp_path) == ["one", "two", "three"]
    assert texts(f"{tmp_path}/*.gz") == ["one"]
    assert [p.slice for p in load(tmp_path)] == ["a", "b", "b"]
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/prompts/a.jsonl.gz", (tmp_path / "a.jsonl.gz").read_bytes())
    memory.pipe_file("/prompts/b.parquet", (tmp_path / "b.parquet").read_bytes())
    assert texts("memory://prompts") == ["one", "two", "three"]
    assert texts("memory://prompts/b.parquet") == ["two", "three"]


def test_a_file_that_is_not_there_names_what_could_have_been_meant(tmp_path):
    line = refusal(tmp_path / "no.jsonl")
    assert "not found" in line and ".parquet" in line
    assert "gsm8k" in refusal("gsm9k")


def test_an_empty_file_is_one_clear_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert "empty file" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "empty").mkdir()
    assert "not found" in refusal(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b"\xff\xfe{"),
        ("a.jsonl", b'{"prompt": "cut off'),
        ("a.jsonl", b'["a list"]'),
        ("a.jsonl.gz", b"not gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 999, mtime=0)[:40]),
        ("a.parquet", b"not parquet"),
        ("a.parquet", b"PAR1 too short PAR1"),
        ("a.csv", b"prompt\nhi"),
    ],
)
def test_a_damaged_file_is_one_clear_line_that_names_it(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert name in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "hi"}, "no messages"),
        ({"messages": []}, "no user turn"),
        ({"messages": "hi there"}, None),
        ({"messages": 3}, "must be text or a list"),
        ({"messages": ["hi"]}, "must be text or a list"),
        ({"messages": [assistant("hi")]}, "no user turn"),
        ({"messages": [user("")]}, "empty user turn"),
        ({"messages": [user("  \n")]}, "empty user turn"),
        ({"prompt": ""}, "empty user turn"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"content": "x"}]}, "role None"),
        ({"messages": [{"role": "user"}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "more than text"),
        ({"messages": [user("a"), user("b")]}, "alternate"),
        ({"messages": [assistant("a"), user("b")]}, "alternate"),
        ({"messages": [{"role": "system", "content": "s"}]}, "alternate"),
        ({"messages": [user("a"), {"role": "system", "content": "s"}, user("b")]}, "start"),
    ],
)
def test_a_malformed_row_is_one_clear_line_that_names_it(tmp_path, row, says):
    path = write(tmp_path / "a.jsonl", {"prompt": "fine"}, row)
    if says is None:
        assert len(load(path)) == 2
        return
    line = refusal(path)
    assert says in line and "a.jsonl:2" in line


def test_unknown_settings_are_refused():
    with pytest.raises(JetspecError, match="unknown key"):
        parse_config({"prompts": {"on_leek": "drop"}})
    assert "preset" in refusal("bundled", mirror="/somewhere")


# Sets


def test_the_same_conversation_is_loaded_once(tmp_path):
    train = write(tmp_path / "t.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    held_out = write(tmp_path / "e.jsonl", {"prompt": "c"}, {"prompt": "c"})
    config = PromptsConfig(
        train=(PromptSource(source=train),), eval=(PromptSource(source=held_out),)
    )
    prompts = load_prompts(config)
    assert [p.messages[0]["content"] for p in prompts.train] == ["a", "b"]
    assert len(prompts.eval) == 1
    assert prompts.duplicates == 2


def test_leaking_training_prompts_are_dropped_and_reported(tmp_path):
    train = write(tmp_path / "t.jsonl", {"prompt": "What is 2+2?"}, {"prompt": "And 3 + 3?"})
    held_out = write(tmp_path / "e.jsonl", {"prompt": "what is  2 + 2"})
    config = PromptsConfig(
        train=(PromptSource(source=train),), eval=(PromptSource(source=held_out),)
    )
    prompts = load_prompts(config)
    assert [p.messages[0]["content"] for p in prompts.train] == ["And 3 + 3?"]
    assert prompts.leaks.dropped == (make_prompt([user("What is 2+2?")], "x", "y").id,)
    assert prompts.leaks.facts()["exact"] == 1


def test_training_on_the_evaluation_set_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"})
    source = (PromptSource(source=path),)
    with pytest.raises(JetspecError, match="all 2 prompts leak"):
        load_prompts(PromptsConfig(train=source, eval=source))


def test_no_source_is_refused():
    with pytest.raises(JetspecError, match=r"prompts\.eval"):
        load_prompts(PromptsConfig(eval=()))


def test_the_hash_follows_content_slice_and_set(tmp_path):
    def hash_of(train: list[dict[str, str]], held_out: list[dict[str, str]]) -> str:
        return load_prompts(
            PromptsConfig(
                train=(PromptSource(source=write(tmp_path / "t.jsonl", *train)),),
                eval=(PromptSource(source=write(tmp_path / "e.jsonl", *held_out)),),
            )
        ).hash

    a, b, c = ({"prompt": text, "slice": "s"} for text in "abc")
    assert hash_of([a, b], [c]) == hash_of([a, b], [c])
    assert len({hash_of([a, b], [c]), hash_of([b], [a]), hash_of([a], [b])}) == 3
    assert hash_of([a, b], [c]) != hash_of([a, {**b, "slice": "t"}], [c])


# Limits


def many(**sizes: int) -> list[Prompt]:
    return [
        make_prompt([user(f"{name} {i}")], name, "x") for name, n in sizes.items() for i in range(n)
    ]


def test_a_limit_is_even_over_slices_as_far_as_they_reach():
    chosen = balanced(many(big=50, mid=20, small=2), 20, seed=0)
    assert [sum(p.slice == s for p in chosen) for s in ("big", "mid", "small")] == [9, 9, 2]
    assert len(balanced(many(a=3, b=3), 100, seed=0)) == 6


def test_a_limit_is_seeded_and_keeps_the_given_order():
    prompts = many(a=40, b=40)
    chosen = balanced(prompts, 10, seed=1)
    assert chosen == balanced(prompts, 10, seed=1)
    assert chosen != balanced(prompts, 10, seed=2)
    assert chosen == [p for p in prompts if p in chosen]
    assert set(p.id for p in chosen) <= set(p.id for p in balanced(prompts, 30, seed=1))
    assert balanced(prompts[::-1], 10, seed=1) == chosen[::-1]


def test_limits_of_a_source_and_of_the_training_set(tmp_path):
    rows = [{"prompt": f"number {i}", "slice": "s" if i % 2 else "t"} for i in range(20)]
    path = write(tmp_path / "a.jsonl", *rows)
    assert len(load(path, limit=6)) == 6
    config = PromptsConfig(train=(PromptSource(source=path),), limit=4)
    prompts = load_prompts(config)
    assert sorted(p.slice for p in prompts.train) == ["s", "s", "t", "t"]
    assert len(prompts.eval) == 72


# Presets, on local directories laid out like the hub repositories


def repository(tmp_path: Path, layout: dict[str, list[dict[str, object]]], card: str = "") -> str:
    """Files of rows by path; `card` is the YAML header of the data card."""
    for name, rows in layout.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif name.endswith(".jsonl"):
            write(path, *rows)
        else:
            path.write_text(json.dumps(rows))
    if card:
        (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


CONFIGS = """configs:
- config_name: {name}
  data_files:
  - split: test
    path: {path}"""
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def test_gsm8k(tmp_path):
    rows = [{"question": "2+2?", "answer": "4 #### 4"}]
    mirror = repository(
        tmp_path,
        {"main/test-00000-of-00001.parquet": rows, "socratic/test-00000.parquet": rows * 2},
        CONFIGS.format(name="main", path="main/test-*"),
    )
    (prompt,) = load("gsm8k", mirror=mirror)
    assert prompt.messages == (user("2+2?" + BOXED),)
    assert (prompt.slice, prompt.source) == ("gsm8k", "openai/gsm8k")
    assert load("gsm8k", mirror=mirror, slice="math")[0].slice == "math"


@pytest.mark.parametrize(
    ("preset", "file"),
    [("math500", "test.jsonl"), ("aime25", "data/train-00000-of-00001.parquet")],
)
def test_competition_mathematics(tmp_path, preset, file):
    mirror = repository(tmp_path, {file: [{"problem": "Find $x$.", "answer": "70"}]})
    (prompt,) = load(preset, mirror=mirror)
    assert prompt.messages == (user("Find $x$." + BOXED),)


def test_humaneval(tmp_path):
    rows = [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "check"}]
    mirror = repository(
        tmp_path,
        {"openai_humaneval/test-00000-of-00001.parquet": rows},
        CONFIGS.format(name="openai_humaneval", path="openai_humaneval/test-*"),
    )
    (prompt,) = load("humaneval", mirror=mirror)
    text = prompt.messages[0]["content"]
    assert text.startswith("Write a solution") and text.endswith("```python\ndef f():\n\n```")


def test_mbpp(tmp_path):
    rows = [
        {"task_id": 11, "text": "Remove it.", "code": "x", "test_list": ["assert a", "assert b"]}
    ]
    mirror = repository(
        tmp_path,
        {"full/test-00000-of-00001.parquet": rows},
        CONFIGS.format(name="full", path="full/test-*"),
    )
    (prompt,) = load("mbpp", mirror=mirror)
    text = prompt.messages[0]["content"]
    assert "Remove it.\nYour code should pass these tests:\nassert a\nassert b" in text


def test_livecodebench_reads_its_plain_files(tmp_path):
    rows = [
        {"question_content": "Sum two.", "starter_code": "", "private_test_cases": "zzz"},
        {"question_content": "Add.", "starter_code": "class Solution:", "private_test_cases": "z"},
    ]
    mirror = repository(
        tmp_path, {"test.jsonl": rows[:1], "test2.jsonl": rows[1:], "code_generation_lite.py": []}
    )
    first, second = (p.messages[0]["content"] for p in load("livecodebench", mirror=mirror))
    assert "### Question:\nSum two." in first and "# YOUR CODE HERE" in first
    assert "```python\nclass Solution:\n```" in second


def test_mt_bench_asks_its_first_turn(tmp_path):
    rows = [{"prompt_id": 81, "category": "writing", "prompt": ["Write.", "Rewrite."]}]
    mirror = repository(tmp_path, {"data/train-00000-of-00001.parquet": rows})
    (prompt,) = load("mt_bench", mirror=mirror)
    assert prompt.messages == (user("Write."),)


def test_code_alpaca_joins_instruction_and_input(tmp_path):
    rows = [
        {"instruction": "Sort it.", "input": "3 1 2", "output": "x"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    mirror = repository(tmp_path, {"code_alpaca_20k.json": rows})
    texts = [p.messages[0]["content"] for p in load("code-alpaca", mirror=mirror)]
    assert texts == ["Sort it.\n\n3 1 2", "Say hi."]


def test_nemotron_takes_four_splits_and_their_categories(tmp_path):
    def row(category: str) -> dict[str, object]:
        messages = [{"role": "system", "content": ""}, user(f"{category}?"), assistant("!")]
        return {"uuid": "1", "category": category, "reasoning": "off", "messages": messages}

    splits = ("chat", "code", "math", "stem", "multilingual_ja")
    files = {f"data/{name}-00000-of-00001.parquet": [row(name)] for name in splits}
    listed = "\n".join(f"  - split: {n}\n    path: data/{n}-*" for n in splits)
    card = f"configs:\n- config_name: default\n  data_files:\n{listed}"
    mirror = repository(tmp_path, files, card)
    prompts = load("nemotron-post-training-v2", mirror=mirror)
    assert [p.slice for p in prompts] == ["chat", "code", "math", "stem"]
    assert prompts[2].messages == (user("math?"),)
    (japanese,) = load("nemotron-post-training-v2", mirror=mirror, split="multilingual_ja")
    assert japanese.slice == "multilingual_ja"


def test_a_preset_with_other_columns_is_one_clear_line(tmp_path):
    mirror = repository(tmp_path, {"test.jsonl": [{"question_text": "2+2?"}]})
    line = refusal("math500", mirror=mirror)
    assert "columns" in line and "problem" in line


def test_a_preset_without_its_hub_is_one_clear_line(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "give a mirror or a file" in refusal("math500")
    assert "not a directory" in refusal("math500", mirror=str(tmp_path / "none"))


def test_every_preset_of_the_product_is_there():
    assert set(PRESETS) == {
        "nemotron-post-training-v2",
        "code-alpaca",
        "gsm8k",
        "math500",
        "aime25",
        "humaneval",
        "mbpp",
        "livecodebench",
        "mt_bench",
    }
