"""A tiny target on disk and run files over it, for the tests of the regeneration stage."""

import json
from pathlib import Path
from typing import Any

from jetspec.config import RunConfig, parse_config
from tests.tiny import tiny_target

WORDS = ["red", "blue", "green", "pink", "gold", "grey", "black", "white", "brown"]
QUESTIONS = [f"what is {w} and {v}" for w in WORDS for v in WORDS if w < v][:14]


def save_target(directory: Path) -> Path:
    target = tiny_target()
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def make_run(
    root: Path, target: Path, *, storage: Path | None = None, **settings: Any
) -> RunConfig:
    """A run over 14 prompts in shards of 4; `settings` go to the section `regeneration`."""
    for name, texts in (("train", QUESTIONS), ("eval", ["where do birds sleep"])):
        rows = [json.dumps({"prompt": text, "slice": "chat"}) + "\n" for text in texts]
        (root / f"{name}.jsonl").write_text("".join(rows))
    small = {"batch_size": 3, "max_new_tokens": 12, "shard_size": 4}
    return parse_config(
        {
            "storage": str(storage or root / "out"),
            "target": {"source": str(target), "cache_dir": str(root / "cache"), "device": "cpu"},
            "prompts": {
                "train": [{"source": str(root / "train.jsonl")}],
                "eval": [{"source": str(root / "eval.jsonl")}],
            },
            "regeneration": {**small, **settings},
        }
    )
