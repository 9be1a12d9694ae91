"""Public prompt sets by name: where they are on the hub and how a row becomes a conversation.

The evaluation sets and their wordings are the ones the paper's tables are measured on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec.errors import JetspecError

_Row = dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """A data set of the hub.

    Attributes:
        path: hub id.
        split: read unless the user asks for another; `a+b` reads both.
        prompt: a row's conversation: user text, or messages.
        config: configuration name, where the set has several.
        slice: slice of every row; a callable reads it from the row.
        files: JSONL files to read by pattern, for a repository that `datasets` cannot open.
    """

    path: str
    split: str
    prompt: Callable[[_Row], Any]
    slice: str | Callable[[_Row], str]
    config: str | None = None
    files: str | None = None


def _reasoned(question: str) -> str:
    return f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def _humaneval(row: _Row) -> str:
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    )


def _mbpp(row: _Row) -> str:
    tests = "\n".join(row["test_list"])
    return (
        "You are an expert Python programmer. Write a solution to the following task and make "
        f"sure it passes the tests:\n{row['text']}\nYour code should pass these tests:\n{tests}"
    )


def _livecodebench(row: _Row) -> str:
    if row.get("starter_code"):
        form = "### Format: Use the following code structure:"
        code = row["starter_code"]
    else:
        form = "### Format: Write your code in the following format:"
        code = "# YOUR CODE HERE"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        f"tests.\n\n### Question:\n{row['question_content']}\n\n{form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


def _code_alpaca(row: _Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]


PRESETS: dict[str, Preset] = {
    "nemotron-post-training-v2": Preset(
        "nvidia/Nemotron-Post-Training-Dataset-v2",
        split="chat+code+math+stem",
        prompt=lambda row: row["messages"],
        slice=lambda row: row["category"],
    ),
    "code-alpaca": Preset(
        "sahil2801/CodeAlpaca-20k", split="train", prompt=_code_alpaca, slice="code"
    ),
    "gsm8k": Preset(
        "openai/gsm8k",
        config="main",
        split="test",
        prompt=lambda row: _reasoned(row["question"]),
        slice="gsm8k",
    ),
    "math500": Preset(
        "HuggingFaceH4/MATH-500",
        split="test",
        prompt=lambda row: _reasoned(row["problem"]),
        slice="math500",
    ),
    "aime25": Preset(
        "MathArena/aime_2025",
        split="train",
        prompt=lambda row: _reasoned(row["problem"]),
        slice="aime25",
    ),
    "humaneval": Preset(
        "openai/openai_humaneval", split="test", prompt=_humaneval, slice="humaneval"
    ),
    "mbpp": Preset(
        "google-research-datasets/mbpp", config="full", split="test", prompt=_mbpp, slice="mbpp"
    ),
    "livecodebench": Preset(
        "livecodebench/code_generation_lite",
        files="test*.jsonl",
        split="test",
        prompt=_livecodebench,
        slice="livecodebench",
    ),
    # The first turn only: the second one refers to an answer that is not part of the set.
    "mt_bench": Preset(
        "HuggingFaceH4/mt_bench_prompts",
        split="train",
        prompt=lambda row: row["prompt"][0],
        slice="mt_bench",
    ),
}


def read_preset(name: str, *, split: str | None, mirror: str | None) -> Iterator[_Row]:
    """The rows of a preset as `messages`, `slice` and `source`.

    Args:
        split: another split than the preset's own.
        mirror: a local directory laid out like the hub repository, read instead of the hub.

    Raises:
        JetspecError: the hub or the mirror cannot be read, or its rows have other columns.
    """
    preset = PRESETS[name]
    for number, row in enumerate(_open(name, preset, split, mirror), 1):
        where = f"{name} row {number}"
        try:
            conversation = preset.prompt(row)
            slice_name = preset.slice if isinstance(preset.slice, str) else preset.slice(row)
        except (KeyError, TypeError, IndexError) as error:
            raise JetspecError(
                "prompts", where, f"not the columns of {preset.path} ({error} missing)"
            ) from error
        yield {
            "messages": conversation,
            "slice": slice_name,
            "source": preset.path,
            "where": where,
            "stem": name,
        }


def _open(name: str, preset: Preset, split: str | None, mirror: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise JetspecError("prompts", name, "needs the package datasets; install it") from error
    if mirror is not None and not Path(mirror).is_dir():
        raise JetspecError("prompts.mirror", mirror, "not a directory; check the path")
    wanted = split or preset.split
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        if preset.files is not None:
            root = mirror or f"hf://datasets/{preset.path}"
            return datasets.load_dataset(
                "json", data_files={preset.split: f"{root}/{preset.files}"}, split=wanted
            )
        return datasets.load_dataset(mirror or preset.path, preset.config, split=wanted)
    except Exception as error:  # offline, gated, renamed or damaged: each has its own class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JetspecError(
            "prompts", name, f"{preset.path} cannot be loaded ({reason}); give a mirror or a file"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
