"""A whole run on disk in miniature: a target directory, a head of it, prompts, and a config."""

import json
from pathlib import Path
from typing import Any

from jetspec.config import RunConfig, parse_config
from jetspec.heads.registry import save_head
from jetspec.storage import write_manifest
from jetspec.targets.fingerprint import fingerprint
from jetspec.targets.load import from_model
from tests.tiny import tiny_head, tiny_model, tiny_tokenizer

QUESTIONS = {
    "math": ("add 2 and 3", "what is 7 times 8", "halve 31"),
    "chat": ("name a colour", "say hello", "why rain?"),
}


def tiny_run(root: Path, **evaluation: Any) -> tuple[RunConfig, str]:
    """The config of a run under `root` and the URI of its head."""
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    target_dir, head_dir = root / "target", root / "head"
    model.save_pretrained(target_dir)
    tokenizer.save_pretrained(target_dir)
    head = tiny_head(from_model(model, tokenizer, "tiny"), mask_token_id=63)
    mark = fingerprint(target_dir)
    save_head(head, str(head_dir), target_fingerprint=mark)
    write_manifest(str(head_dir), kind="head", config_hash="c", target_fingerprint=mark)
    rows = [{"prompt": q, "slice": s} for s, questions in QUESTIONS.items() for q in questions]
    held_out, train = root / "eval.jsonl", root / "train.jsonl"
    held_out.write_text("\n".join(map(json.dumps, rows)))
    train.write_text(json.dumps({"prompt": "something else altogether", "slice": "chat"}))
    settings = {
        "budgets": [4],
        "max_new_tokens": 8,
        "warmup_prompts": 0,
        "bootstrap_samples": 100,
        "width": 4,
        **evaluation,
    }
    config = parse_config(
        {
            "storage": str(root / "runs"),
            "target": {"source": str(target_dir), "cache_dir": str(root / "cache")},
            "prompts": {
                "train": [{"source": str(train)}],
                "eval": [{"source": str(held_out)}],
            },
            "evaluation": settings,
            "promotion": {"budget": 4, "bootstrap_samples": 100},
            "ray": {"cpus": 2},
        }
    )
    return config, str(head_dir)
