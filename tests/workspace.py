"""A tiny project on disk, driven through the real command line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.testing import CliRunner, Result

from jetspec.cli import app as library_app
from tests.answers import save_target
from tests.tiny import tiny_target

_WORDS = ("sum", "list", "loop", "tree", "draft", "model", "head", "round", "token", "node")


def run_settings(root: Path, **changes: Any) -> dict[str, Any]:
    """A run over a tiny target that takes seconds; `changes` replace whole sections' fields."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "storage": str(root / "runs"),
        "target": {
            "source": str(root / "target"),
            "dtype": "fp32",
            "device": "cpu",
            "cache_dir": str(root / "cache"),
        },
        "prompts": {
            "train": [{"source": str(root / "train.jsonl")}],
            "eval": [{"source": str(root / "eval.jsonl")}],
        },
        "regeneration": {"batch_size": 4, "max_new_tokens": 24, "shard_size": 4},
        "head": {"num_layers": 1, "block_size": 4, "num_taps": 2},
        "training": {
            "anchors": 4,
            "sequence_length": 64,
            "batch_size": 4,
            "micro_batch_size": 4,
            "epochs": 1,
            "heldout_fraction": 0.3,
        },
        "evaluation": {
            "methods": ["chain", "tree"],
            "budgets": [4],
            "width": 4,
            "max_new_tokens": 8,
            "prompts_per_slice": 3,
            "warmup_prompts": 0,
            "bootstrap_samples": 100,
        },
        "promotion": {"budget": 4, "bootstrap_samples": 100},
    }
    for section, values in changes.items():
        settings[section] = {**settings[section], **values}
    return settings


@dataclass
class Workspace:
    """A directory with a target, prompts and a run file."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> "Workspace":
        save_target(tiny_target("llama"), root / "target")
        for name, start in (("train", 0), ("eval", 5)):
            rows = [
                {"prompt": f"what is a {_WORDS[start + i % 5]} of {i}?", "slice": "chat"}
                for i in range(10 if name == "train" else 5)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (root / f"{name}.jsonl").write_text(text)
        workspace = cls(root)
        workspace.write_run("run.yaml")
        return workspace

    @property
    def run(self) -> str:
        return str(self.root / "run.yaml")

    def write_run(self, name: str, **changes: Any) -> str:
        path = self.root / name
        path.write_text(yaml.safe_dump(run_settings(self.root, **changes)))
        return str(path)

    def library(self, *arguments: str) -> Result:
        """`python -m jetspec ...`"""
        return invoke(library_app, *arguments)

    def stage(self, *arguments: str) -> dict[str, Any]:
        """A library command that must succeed; its JSON."""
        result = self.library(*arguments, "--json")
        assert result.exit_code == 0, f"{result.output}{result.exception!r}"
        return dict(json.loads(result.stdout))


def invoke(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def one_line(result: Result) -> str:
    """The error of a command that failed as a user's mistake should: one line, status 2."""
    shown = repr(result.exception) if result.exception else ""
    assert result.exit_code == 2, f"{result.output}{shown}"
    assert isinstance(result.exception, SystemExit), shown
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.output
    return lines[0]
