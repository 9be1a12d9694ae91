"""The promotion stage on made-up records: real gates, real registry, no model."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows import promote, registry, tracking
from jetspec import storage
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.stages import StageResult

PROMPTS = 12


@dataclass
class Finding:
    ok: bool
    check: str = "layers"
    detail: str = "inside the target"


def healthy(config: RunConfig, head_uri: str) -> Iterable[Finding]:
    return [Finding(True)]


def sick(config: RunConfig, head_uri: str) -> Iterable[Finding]:
    return [Finding(False, "mask id", "is the stop token")]


def cell(method: str, tokens: int, fingerprint: str, **fields: Any) -> dict[str, Any]:
    """A record with the fields that gates and tables read; each prompt takes ten rounds."""
    drafted = method != "plain"
    speed = {"value": 1.5, "ci": [1.4, 1.6], "reason": None}
    return {
        "key": f"{method}-math",
        "method": method,
        "builder": "best_first" if drafted else None,
        "budget": 16 if drafted else 0,
        "batch_size": 1,
        "slice": "math",
        "temperature": 0.0,
        "status": "ok",
        "reason": None,
        "tau": tokens / 10,
        "tau_ci": [tokens / 10, tokens / 10],
        "per_prompt": [
            {"prompt_id": str(i), "slice": "math", "tokens": tokens, "rounds": 10}
            for i in range(PROMPTS)
        ],
        "batches": [
            {"decode_tokens": tokens, "decode_seconds": 1.0, "total_tokens": tokens}
            for _ in range(PROMPTS)
        ],
        "speedup": {"vs_plain": speed},
        "output_check": {"passed": True, "compared": PROMPTS, "differing": 0, "near_ties": 0},
        "device": "cpu",
        "target_fingerprint": fingerprint,
        **fields,
    }


class Pipeline:
    """Makes stage directories and runs the promotion stage on them."""

    def __init__(self, root: Path, store: Path, name: str) -> None:
        self.root = root
        self.config = parse_config({"storage": str(store), "target": {"source": f"org/{name}"}})

    def head(self, weights: str, fingerprint: str = "f") -> str:
        directory = self.root / f"head-{weights}"
        if not directory.exists():
            directory.mkdir()
            (directory / "config.json").write_text("{}")
            text = f"{self.config.target.source} {weights}"
            (directory / "model.safetensors").write_text(text)
            storage.write_manifest(
                str(directory), kind="head", config_hash="c", target_fingerprint=fingerprint
            )
        return str(directory)

    def evaluation(self, head: str, tokens: int, fingerprint: str = "f", **fields: Any) -> str:
        directory = self.root / f"evaluation-{Path(head).name}-{tokens}-{fingerprint}"
        if directory.exists():
            return str(directory)
        records = [
            cell("plain", 10, fingerprint),
            cell("tree", tokens, fingerprint, **fields),
        ]
        for record in records:
            storage.write_json(f"{directory}/cell-{record['key']}.json", record)
        storage.write_json(f"{directory}/serving_table.json", {"rows": []})
        manifest = storage.read_manifest(head, kind="head")
        storage.write_manifest(
            str(directory),
            kind="evaluation",
            config_hash="c",
            head_uri=head,
            head_hash=storage.content_hash(manifest["files"]),
            target_fingerprint=fingerprint,
            prompts_hash="p",
            cells=[record["key"] for record in records],
        )
        return str(directory)

    def promote(self, head: str, evaluation: str, doctor: promote.Doctor = healthy) -> StageResult:
        with tracking.pipeline_run(self.config) as run:
            return promote.promote_head(self.config, head, evaluation, run=run, doctor=doctor)

    def champion(self) -> int | None:
        found = registry.champion(self.config)
        return None if found is None else found.version


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def pipeline(tmp_path: Path, store: Path, request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline(tmp_path, store, request.node.name)


def test_a_good_first_head_becomes_champion_with_its_lineage(pipeline: Pipeline) -> None:
    head = pipeline.head("a")
    evaluation = pipeline.evaluation(head, 20)
    result = pipeline.promote(head, evaluation)
    assert result.facts["promoted"], result.facts["reasons"]
    assert result.facts["champion"] == result.facts["version"] == 1
    assert result.facts["metrics"]["tau"] == 2.0
    found = registry.champion(pipeline.config)
    assert found is not None
    assert found.lineage["target_fingerprint"] == "f"
    assert found.lineage["evaluation_uri"] == evaluation
    assert found.lineage["config_hash"] == storage.content_hash(
        pipeline.config.model_dump(mode="json")
    )
    assert found.metrics["tau/tree-math"] == 2.0
    assert found.verdict["promote"] is True


def test_a_better_head_replaces_the_champion_and_a_worse_one_stays_challenger(
    pipeline: Pipeline,
) -> None:
    for weights, tokens in (("a", 20), ("b", 25)):
        head = pipeline.head(weights)
        assert pipeline.promote(head, pipeline.evaluation(head, tokens)).facts["promoted"]
    worse = pipeline.head("c")
    result = pipeline.promote(worse, pipeline.evaluation(worse, 24))
    assert not result.facts["promoted"]
    assert result.facts["champion"] == 2
    assert any(r["gate"] == "tau" and not r["passed"] for r in result.facts["reasons"])
    waiting = registry.challenger(pipeline.config)
    assert waiting is not None
    assert waiting.version == result.facts["version"] == 3


def test_the_same_head_again_changes_nothing(pipeline: Pipeline) -> None:
    head = pipeline.head("a")
    evaluation = pipeline.evaluation(head, 20)
    pipeline.promote(head, evaluation)
    result = pipeline.promote(head, evaluation)
    assert result.reused
    assert result.facts["champion"] == result.facts["version"] == 1
    assert "already is champion" in result.facts["reasons"][0]["detail"]


@pytest.mark.parametrize("flaw", ["doctor", "lossless"])
def test_one_failed_gate_keeps_a_head_from_becoming_champion(flaw: str, pipeline: Pipeline) -> None:
    wrong = {"passed": False, "compared": PROMPTS, "differing": 1, "near_ties": 0}
    fields = {"output_check": wrong} if flaw == "lossless" else {}
    head = pipeline.head("a")
    result = pipeline.promote(
        head,
        pipeline.evaluation(head, 30, **fields),
        doctor=sick if flaw == "doctor" else healthy,
    )
    assert not result.facts["promoted"]
    assert pipeline.champion() is None
    failed = [r["gate"] for r in result.facts["reasons"] if not r["passed"]]
    assert flaw in failed


def test_a_champion_of_the_old_target_does_not_set_the_bar_for_the_new_one(
    pipeline: Pipeline,
) -> None:
    old = pipeline.head("a", "old")
    pipeline.promote(old, pipeline.evaluation(old, 40, "old"))
    new = pipeline.head("b", "new")
    result = pipeline.promote(new, pipeline.evaluation(new, 20, "new"))
    assert result.facts["promoted"], result.facts["reasons"]
    assert pipeline.champion() == 2


def test_a_champion_measured_again_is_compared_by_its_new_figures(pipeline: Pipeline) -> None:
    old = pipeline.head("a")
    pipeline.promote(old, pipeline.evaluation(old, 20))
    new = pipeline.head("b")
    evaluation = pipeline.evaluation(new, 25)
    with tracking.pipeline_run(pipeline.config) as run:
        result = promote.promote_head(
            pipeline.config,
            new,
            evaluation,
            run=run,
            champion_records=[cell("plain", 10, "f"), cell("tree", 30, "f")],
            doctor=healthy,
        )
    assert not result.facts["promoted"]
    assert pipeline.champion() == 1


def test_an_evaluation_of_another_head_is_refused(pipeline: Pipeline) -> None:
    one, two = pipeline.head("a"), pipeline.head("b")
    with pytest.raises(JetspecError, match="is not of the head"):
        pipeline.promote(one, pipeline.evaluation(two, 20))
    assert pipeline.champion() is None


def test_the_code_version_names_package_and_commit() -> None:
    from jetspec import __version__

    assert promote.code_version().startswith(__version__)
