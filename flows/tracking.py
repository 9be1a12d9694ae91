"""What a pipeline run leaves in MLflow: runs, settings, curves, figures, and heads as models.

A parent run stands for one pipeline run; its stages and the cells of the matrix are nested in
it. Handles (`Run`) are plain strings, so they cross a task edge and work in any process.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.metrics import CELL_FIELDS, cell_metrics, finite, flatten, metric_key
from jetspec import __version__, storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

for _name in ("mlflow.store.db.utils", "alembic"):
    logging.getLogger(_name).setLevel(logging.WARNING)

_PARENT = "mlflow.parentRunId"
_RUN_NAME = "mlflow.runName"
_BATCH = 100  # MLflow's limit of params in one request
_HEAD_HASH = "jetspec.head_sha256"


def tracking_uri(config: RunConfig) -> str:
    """Where this run's MLflow lives: `tracking.uri`, or a sqlite file under a local storage.

    Raises:
        JetspecError: the storage is an object store, where sqlite cannot live.
    """
    if config.tracking.uri is not None:
        return config.tracking.uri
    if not storage.is_local(config.storage):
        raise JetspecError(
            "tracking.uri",
            "not set",
            f"storage {config.storage} cannot hold sqlite; give the URI of an MLflow server"
            " or sqlite:////absolute/path.db",
        )
    return f"sqlite:///{storage.absolute(config.storage)}/mlflow.db"


def artifact_root(config: RunConfig) -> str | None:
    """Directory of artefacts beside a sqlite file; None where a server decides."""
    uri = tracking_uri(config)
    if not uri.startswith("sqlite:///"):
        return None
    return str(Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts")


def connect(config: RunConfig, *, create: bool = True) -> MlflowClient:
    """A client of this run's MLflow.

    Raises:
        JetspecError: nothing is there yet and `create` is False, or it cannot be made or reached.
    """
    uri = tracking_uri(config)
    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///"))
        if not create and not file.exists():
            raise JetspecError(
                "storage", file.parent, "holds no MLflow records yet; run `jetspec run` first"
            )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise JetspecError("storage", file.parent, f"cannot be written ({reason})") from error
    elif uri.startswith(("http://", "https://")):
        _check_reachable(uri)
    # The registry's sqlite store looks models up under the process-wide URI, not the client's.
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        first = str(error).splitlines()[0][:160]
        raise JetspecError("tracking.uri", uri, f"cannot be used ({first})") from error
    return client


def _check_reachable(uri: str) -> None:
    """Ask once: MLflow's client would retry a dead server for minutes before saying so."""
    parts = urlsplit(uri)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise JetspecError(
            "tracking.uri", uri, f"cannot be reached ({reason}); start it, or mend the address"
        ) from error


def experiment_id(client: MlflowClient, config: RunConfig) -> str:
    name = config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name, artifact_location=artifact_root(config)))
    except MlflowException:
        # Another process was first.
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)


@dataclass(frozen=True)
class Run:
    """A handle on one MLflow run: strings only."""

    uri: str
    experiment_id: str
    run_id: str

    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Settings, nested mappings flattened to dotted keys; long values are cut."""
        params = [Param(key, value) for key, value in flatten(values).items()]
        for start in range(0, len(params), _BATCH):
            self.client().log_batch(self.run_id, params=params[start : start + _BATCH])

    def log_metrics(self, values: Mapping[str, Any], step: int = 0) -> None:
        """Numbers of one moment; what is not a finite number is left out."""
        self._log_points([(step, values)])

    def log_curve(self, curve: Iterable[Mapping[str, Any]], step_key: str = "step") -> None:
        """Rows such as `{"step": 10, "loss": 3.2}`: one metric series per other key."""
        rows = list(curve)
        self._log_points([(int(row.get(step_key, i)), row) for i, row in enumerate(rows)], step_key)

    def _log_points(
        self, points: Sequence[tuple[int, Mapping[str, Any]]], skip: str | None = None
    ) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(metric_key(key), number, now, step)
            for step, row in points
            for key, value in row.items()
            if key != skip and (number := finite(value)) is not None
        ]
        for start in range(0, len(metrics), 500):
            self.client().log_batch(self.run_id, metrics=metrics[start : start + 500])

    def log_tags(self, values: Mapping[str, Any]) -> None:
        tags = [RunTag(key, str(value)) for key, value in values.items()]
        self.client().log_batch(self.run_id, tags=tags)

    def log_json(self, value: Any, name: str) -> None:
        text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
        self.client().log_text(self.run_id, text, name)

    def log_files(self, paths: Iterable[str | Path], directory: str = "figures") -> None:
        """Local files, e.g. the figures of the evaluation report."""
        for path in paths:
            self.client().log_artifact(self.run_id, str(path), directory)

    def log_figure(self, figure: Any, name: str) -> None:
        """A matplotlib figure as `figures/<name>.png`."""
        self.client().log_figure(self.run_id, figure, f"figures/{name}.png")


@contextlib.contextmanager
def pipeline_run(config: RunConfig) -> Iterator[Run]:
    """The parent run of one pipeline run, with every resolved setting; ends as the body ends."""
    client = connect(config)
    experiment = experiment_id(client, config)
    resolved = config.model_dump(mode="json")
    tags = {
        _RUN_NAME: config.name,
        "jetspec.kind": "pipeline",
        "jetspec.code_version": __version__,
        "jetspec.config_hash": storage.content_hash(resolved),
    }
    with _running(client, tracking_uri(config), experiment, tags) as run:
        run.log_params(resolved)
        run.log_json(resolved, "run.json")
        yield run


@contextlib.contextmanager
def stage_run(parent: Run, stage: str) -> Iterator[Run]:
    """A run nested in `parent`: one stage, or one cell of the matrix."""
    tags = {_RUN_NAME: stage, _PARENT: parent.run_id, "jetspec.kind": "stage"}
    with _running(parent.client(), parent.uri, parent.experiment_id, tags) as run:
        yield run


@contextlib.contextmanager
def _running(
    client: MlflowClient, uri: str, experiment: str, tags: dict[str, str]
) -> Iterator[Run]:
    run = Run(uri, experiment, client.create_run(experiment, tags=tags).info.run_id)
    try:
        yield run
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | SystemExit)
        with contextlib.suppress(MlflowException):
            run.log_tags({"jetspec.error": f"{type(error).__name__}: {error}"[:4000]})
            client.set_terminated(run.run_id, "KILLED" if killed else "FAILED")
        raise
    client.set_terminated(run.run_id, "FINISHED")


def log_skip(config: RunConfig, reason: str, facts: Mapping[str, Any]) -> str:
    """A pipeline run that had nothing to do, kept as a record; returns its run id."""
    with pipeline_run(config) as run:
        run.log_tags({"jetspec.outcome": "skipped", "jetspec.reason": reason, **facts})
    return run.run_id


def log_cells(parent: Run, records: Iterable[Mapping[str, Any]]) -> None:
    """One nested run per cell record: its coordinates as params, its figures as metrics."""
    for record in records:
        with stage_run(parent, record["key"]) as run:
            run.log_tags({"jetspec.kind": "cell", "jetspec.status": record.get("status", "ok")})
            run.log_params({k: record.get(k) for k in CELL_FIELDS})
            if record.get("reason"):
                run.log_tags({"jetspec.reason": record["reason"]})
            run.log_metrics(cell_metrics(record))
            depths = record.get("acceptance_by_depth") or []
            run.log_curve(
                [{"step": d + 1, "acceptance_by_depth": rate} for d, rate in enumerate(depths)]
            )
            run.log_json(record, "record.json")


def log_head(
    run: Run,
    head_uri: str,
    metrics: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
) -> str:
    """A head directory as a LoggedModel with its metrics; one head is stored once.

    Args:
        head_uri: a complete head directory, local or remote.
        metrics: e.g. `headline_metrics` and `head_metrics` of its records, what the UI compares.

    Returns:
        The model id that the registry registers.
    """
    manifest = storage.read_manifest(head_uri, kind="head")
    digest = head_hash(manifest)
    client = run.client()
    model_id = find_head(client, run.experiment_id, digest)
    if model_id is None:
        model = client.create_logged_model(
            run.experiment_id,
            name=f"head-{digest[:12]}",
            source_run_id=run.run_id,
            tags={_HEAD_HASH: digest, "jetspec.head_uri": head_uri},
            params={**flatten(dict(params or {})), **flatten(_head_facts(manifest))},
            model_type="draft-head",
        )
        model_id = str(model.model_id)
        with local_copy(head_uri) as directory:
            client.log_model_artifacts(model_id, directory)
        client.finalize_logged_model(model_id, "READY")
    outputs = client.get_run(run.run_id).outputs
    if model_id not in [m.model_id for m in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run.run_id, [LoggedModelOutput(model_id, 0)])
    log_model_metrics(run, model_id, metrics)
    return model_id


def log_model_metrics(run: Run, model_id: str, metrics: Mapping[str, Any]) -> None:
    """Figures of a head, on its LoggedModel and on `run` alike."""
    client = run.client()
    for key, value in metrics.items():
        if (number := finite(value)) is not None:
            client.log_metric(run.run_id, metric_key(key), number, step=0, model_id=model_id)


def find_head(client: MlflowClient, experiment: str, digest: str) -> str | None:
    """The finished LoggedModel of the head with this hash; a half-logged one does not count."""
    found = client.search_logged_models(
        experiment_ids=[experiment], filter_string=f"tags.`{_HEAD_HASH}` = '{digest}'"
    )
    ready = [m for m in found if str(m.status) == "READY"]
    return str(ready[0].model_id) if ready else None


def head_hash(manifest: Mapping[str, Any]) -> str:
    """One hash over a head's weights and shape, from its manifest."""
    files = manifest["files"]
    named = {n: files[n]["sha256"] for n in ("config.json", "model.safetensors") if n in files}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _head_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("files", "kind")
    return {f"head.{key}": value for key, value in manifest.items() if key not in left_out}


@contextlib.contextmanager
def local_copy(uri: str) -> Iterator[str]:
    """A local directory with the files of `uri`; a copy that is removed if `uri` is remote."""
    if storage.is_local(uri):
        yield storage.absolute(uri)
        return
    fs, path = storage.filesystem(uri)
    with tempfile.TemporaryDirectory() as directory:
        for name in storage.list_files(uri):
            fs.get_file(f"{path}/{name}", f"{directory}/{name}")
        yield directory
