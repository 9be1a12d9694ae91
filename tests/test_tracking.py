"""What a run leaves in MLflow, read back through MLflow's own client."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows import metrics, tracking
from jetspec import storage
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError

RECORD: dict[str, Any] = {
    "key": "tree-16-math",
    "method": "tree",
    "builder": "best_first",
    "budget": 16,
    "batch_size": 1,
    "slice": "math",
    "temperature": 0.0,
    "status": "ok",
    "tau": 2.0,
    "tau_ci": [1.8, 2.2],
    "tok_s_decode": 50.0,
    "speedup": {"vs_plain": {"value": 1.5, "ci": [1.4, 1.6]}, "vs_hf_eager": None},
    "time_share": {"draft": 0.25, "verify": 0.75},
    "acceptance_by_depth": [0.8, 0.5],
    "output_check": {"passed": True, "compared": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return parse_config({"storage": str(tmp_path_factory.mktemp("runs"))})


def write_head(directory: Path, weights: bytes = b"weights") -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    storage.write_manifest(
        str(directory), kind="head", config_hash="c", target_fingerprint="f", steps=7
    )
    return str(directory)


def test_every_resolved_setting_is_a_param_and_the_run_file_stands_whole(config: RunConfig) -> None:
    with tracking.pipeline_run(config) as run:
        pass
    stored = run.client().get_run(run.run_id)
    params = stored.data.params
    assert params["training.loss.gamma"] == "0.0"
    assert params["evaluation.budgets"] == "[16, 64, 128]"
    assert params["ray.cpus"] == "null"
    assert stored.info.status == "FINISHED"
    whole = Path(run.client().download_artifacts(run.run_id, "run.json")).read_text()
    assert json.loads(whole) == config.model_dump(mode="json")


def test_a_long_value_is_cut_and_stays_distinguishable() -> None:
    one = metrics.flatten({"a": {"b": "x" * 9000}})["a.b"]
    two = metrics.flatten({"a": {"b": "x" * 8999 + "y"}})["a.b"]
    assert len(one) <= 500
    assert one != two


def test_stages_and_cells_are_nested_and_withheld_figures_are_absent(config: RunConfig) -> None:
    with tracking.pipeline_run(config) as run:
        tracking.log_cells(run, [RECORD, {**RECORD, "slice": "code", "status": "out_of_memory"}])
    client = run.client()
    nested = client.search_runs(
        [run.experiment_id], filter_string=f"tags.mlflow.parentRunId = '{run.run_id}'"
    )
    assert len(nested) == 2
    by_slice = {r.data.params["slice"]: r for r in nested}
    assert by_slice["code"].data.tags["jetspec.status"] == "out_of_memory"
    logged = by_slice["math"].data.metrics
    assert logged["tau_lo"] == 1.8
    assert logged["speedup_vs_plain_hi"] == 1.6
    assert logged["output_check_passed"] == 1.0
    assert not any(key.startswith("speedup_vs_hf_eager") for key in logged)
    depths = client.get_metric_history(by_slice["math"].info.run_id, "acceptance_by_depth")
    assert [(m.step, m.value) for m in depths] == [(1, 0.8), (2, 0.5)]


def test_a_failing_body_marks_its_run_failed_with_the_reason(config: RunConfig) -> None:
    seen: list[tracking.Run] = []
    with pytest.raises(ValueError, match="broke"), tracking.pipeline_run(config) as run:
        seen.append(run)
        with tracking.stage_run(run, "train"):
            raise ValueError("broke")
    stored = seen[0].client().get_run(seen[0].run_id)
    assert stored.info.status == "FAILED"
    assert stored.data.tags["jetspec.error"] == "ValueError: broke"


def test_a_curve_keeps_its_steps_and_drops_what_is_not_a_number(config: RunConfig) -> None:
    with tracking.pipeline_run(config) as run:
        run.log_curve([{"step": 10, "loss": 3.0}, {"step": 20, "loss": float("nan"), "x": "y"}])
    history = run.client().get_metric_history(run.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(10, 3.0)]


def test_one_head_is_one_logged_model_with_its_metrics(config: RunConfig, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    figures = metrics.head_metrics([RECORD, {**RECORD, "method": "plain", "key": "plain"}])
    with tracking.pipeline_run(config) as run:
        first = tracking.log_head(run, head, {"tau": 2.0, **figures}, {"head": {"mask": "causal"}})
        again = tracking.log_head(run, head, {})
        other = tracking.log_head(run, write_head(tmp_path / "other", b"different"), {})
    assert first == again != other
    model = run.client().get_logged_model(first)
    logged = {m.key: m.value for m in model.metrics}
    assert logged["tau"] == 2.0
    assert logged["tau_lo/tree-16-math"] == 1.8
    assert not any("plain" in key.split("/")[-1] for key in logged)
    assert model.params["head.mask"] == "causal"
    names = {f.path for f in run.client().list_logged_model_artifacts(first)}
    assert names == {"config.json", "model.safetensors", "manifest.json"}


def test_a_head_without_manifest_is_not_logged(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    with (
        pytest.raises(JetspecError, match="no manifest"),
        tracking.pipeline_run(config) as run,
    ):
        tracking.log_head(run, str(tmp_path / "head"), {})


def test_object_storage_asks_for_a_tracking_server() -> None:
    config = parse_config({"storage": "s3://bucket/runs"})
    with pytest.raises(JetspecError, match="tracking.uri") as error:
        tracking.tracking_uri(config)
    assert "sqlite" in str(error.value)


def test_an_unreachable_server_is_one_line() -> None:
    config = parse_config({"tracking": {"uri": "http://127.0.0.1:9"}})
    with pytest.raises(JetspecError, match="cannot be reached") as error:
        tracking.connect(config)
    assert "\n" not in str(error.value)


def test_reading_a_storage_without_records_creates_nothing(tmp_path: Path) -> None:
    config = parse_config({"storage": str(tmp_path / "typo")})
    with pytest.raises(JetspecError, match="no MLflow records"):
        tracking.connect(config, create=False)
    assert not (tmp_path / "typo").exists()


def test_headline_pools_prompts_of_all_slices_at_the_promoted_budget() -> None:
    config = parse_config({"promotion": {"budget": 16}})
    batch = {"decode_tokens": 30, "decode_seconds": 1.0}

    def cell(prompt: str, tokens: int, seconds: float = 1.0, **fields: Any) -> dict[str, Any]:
        row = {"prompt_id": prompt, "tokens": tokens, "rounds": 10, "looping": False}
        batches = [{**batch, "decode_seconds": seconds}]
        return {**RECORD, "tau": tokens / 10, "per_prompt": [row], "batches": batches, **fields}

    records = [
        cell("a", 30, 0.5),
        cell("b", 10, 0.5, slice="code"),
        cell("a", 500, budget=64),
        cell("a", 500, method="chain"),
        cell("a", 10, method="plain"),
        cell("b", 10, method="plain", slice="code"),
    ]
    figures = metrics.headline_metrics(records, config)
    assert figures["tau"] == 2.0
    assert figures["tau_lo"] <= 2.0 <= figures["tau_hi"]
    assert (figures["tau/math"], figures["tau/code"]) == (3.0, 1.0)
    assert figures["speedup_vs_plain"] == pytest.approx(2.0)
    assert metrics.headline_metrics(records[2:], config) == {}
    records[1] = {**records[1], "speedup": {"vs_plain": {"value": None, "reason": "differs"}}}
    assert "speedup_vs_plain" not in metrics.headline_metrics(records, config)
