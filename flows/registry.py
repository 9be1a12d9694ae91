"""The model registry: versions of a target's draft head, the challenger, and the champion.

A version's files are the head's, and beside them in a folder of the version's own its serving
table, records, metrics, verdict and lineage. The alias `champion` is the commit point: it moves
last, when everything it stands for is in place, so a crash at any step leaves the old champion.
"""

import json
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from flows.registered import NAME_PREFIX, ChampionRecord, Version, registered_name
from flows.tracking import connect, experiment_id, find_head, head_hash, tracking_uri
from jetspec import storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.heads.shipped import head_directory

CHAMPION = "champion"
CHALLENGER = "challenger"
_PREVIOUS = "previous_champion"
_CONTENT = "content"  # hash over head and records: what makes two versions one
_METRICS = "metrics"
_FILES = ("serving_table", "records", "metrics", "verdict", "lineage")


def register(
    config: RunConfig,
    head_uri: str,
    *,
    lineage: Mapping[str, Any],
    serving_table: Any,
    records: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
    headline: Mapping[str, float],
    verdict: Mapping[str, Any],
    run_id: str | None = None,
) -> Version:
    """A version of a head that `log_head` stored, with the alias `challenger`.

    The same head with the same records is registered once, however often this is called.

    Args:
        lineage: flat JSON values; the short ones become tags. `target_fingerprint` is needed.
        records: the head's cells; the next challenger is compared with them.
        metrics: figures of every cell; `headline` the few that `compare` shows.
        verdict: what the gates said.

    Raises:
        JetspecError: the head was never logged.
    """
    name = registered_name(config.target)
    client = connect(config)
    digest = head_hash(storage.read_manifest(head_uri, kind="head"))
    model_id = find_head(client, experiment_id(client, config), digest)
    if model_id is None:
        raise JetspecError("head", head_uri, "not logged to MLflow; log it before registering it")
    content = storage.content_hash([digest, list(records), serving_table])
    version = next((v for v in _versions(client, name) if v.tags.get(_CONTENT) == content), None)
    if version is None:
        values = (serving_table, list(records), dict(metrics), dict(verdict), dict(lineage))
        with tempfile.TemporaryDirectory() as folder:
            for file, value in zip(_FILES, values, strict=True):
                storage.write_json(f"{folder}/{file}.json", value)
            client.log_model_artifacts(model_id, folder, _folder(content))
        if not _name_exists(client, name):
            client.create_registered_model(name)
        short = {k: str(v) for k, v in lineage.items() if isinstance(v, str | int | float)}
        version = client.create_model_version(
            name,
            source=f"models:/{model_id}",
            run_id=run_id,
            model_id=model_id,
            tags={
                **short,
                "head_uri": head_uri,
                _CONTENT: content,
                _METRICS: json.dumps(dict(headline)),
            },
        )
    client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    return _describe(client.get_model_version(name, str(version.version)))


def promote(config: RunConfig, version: int, name: str | None = None) -> Version:
    """Make `version` champion; the one before is kept in its tag `previous_champion`.

    Raises:
        JetspecError: no such version, or its files are not whole.
    """
    client = connect(config, create=False)
    name = name or registered_name(config.target)
    _open(client, config, _version(client, name, version))  # never point at missing files
    current = _aliased(client, name, CHAMPION)
    if current is not None and int(current.version) != version:
        client.set_model_version_tag(name, str(version), _PREVIOUS, str(current.version))
    client.set_registered_model_alias(name, CHAMPION, str(version))
    return _describe(_version(client, name, version))


def rollback(config: RunConfig, name: str | None = None) -> Version:
    """Move the champion back to the version before it.

    Raises:
        JetspecError: there is no champion, or none came before it.
    """
    client = connect(config, create=False)
    name = name or registered_name(config.target)
    current = _aliased(client, name, CHAMPION)
    if current is None:
        raise JetspecError("registry", name, "has no champion; there is nothing to roll back")
    previous = current.tags.get(_PREVIOUS)
    if previous is None:
        raise JetspecError(
            "registry", f"{name} version {current.version}", "is the first champion; none before it"
        )
    _open(client, config, _version(client, name, int(previous)))
    client.set_registered_model_alias(name, CHAMPION, previous)
    client.set_model_version_tag(name, str(current.version), "rolled_back_to", previous)
    return _describe(_version(client, name, int(previous)))


def champion(config: RunConfig, name: str | None = None) -> ChampionRecord | None:
    """The champion with its files, or None while there is none; creates nothing."""
    try:
        client = connect(config, create=False)
    except JetspecError as error:
        if error.field == "storage":
            return None
        raise
    current = _aliased(client, name or registered_name(config.target), CHAMPION)
    return None if current is None else _open(client, config, current)


def require_champion(config: RunConfig, name: str) -> ChampionRecord:
    """The champion.

    Raises:
        JetspecError: there is none yet.
    """
    found = champion(config, name)
    if found is None:
        raise JetspecError(
            "registry",
            name,
            "has no champion yet: `jetspec run` makes one of a version that passes the gates",
        )
    return found


def champion_version(config: RunConfig, name: str) -> int | None:
    """Which version is champion, its files left alone."""
    current = _aliased(connect(config, create=False), name, CHAMPION)
    return None if current is None else int(current.version)


def warm_start_uri(config: RunConfig) -> str | None:
    """The head directory that training starts from, `champion` and `shipped` looked up.

    Raises:
        JetspecError: the run asks for the champion and there is none.
    """
    start = config.training.warm_start
    if start != CHAMPION:
        return None if start is None else head_directory(start)
    found = champion(config)
    if found is None:
        name = registered_name(config.target)
        raise JetspecError("training.warm_start", start, f"{name} has no champion; leave it out")
    return found.head_uri


def open_version(config: RunConfig, version: int, name: str | None = None) -> ChampionRecord:
    """Any version with its files."""
    client = connect(config, create=False)
    name = name or registered_name(config.target)
    return _open(client, config, _version(client, name, version))


def names(config: RunConfig) -> list[str]:
    """Registered models of this project, sorted."""
    client = connect(config, create=False)
    found = client.search_registered_models(filter_string=f"name LIKE '{NAME_PREFIX}%'")
    return sorted(str(model.name) for model in found)


def versions(config: RunConfig, name: str) -> list[Version]:
    """All versions of a name, newest first."""
    client = connect(config, create=False)
    # A search leaves the aliases out.
    full = [client.get_model_version(name, str(v.version)) for v in _versions(client, name)]
    return sorted((_describe(v) for v in full), key=lambda v: -v.version)


def challenger(config: RunConfig, name: str | None = None) -> Version | None:
    client = connect(config, create=False)
    found = _aliased(client, name or registered_name(config.target), CHALLENGER)
    return None if found is None else _describe(found)


def _open(client: MlflowClient, config: RunConfig, version: ModelVersion) -> ChampionRecord:
    shown = f"{version.name} version {version.version}"
    directory = _download(config, _model_id(version), shown)
    folder = f"{directory}/{_folder(version.tags[_CONTENT])}"
    try:
        storage.read_manifest(directory, kind="head", verify=False)
        files = {file: storage.read_json(f"{folder}/{file}.json") for file in _FILES}
    except JetspecError as error:
        raise JetspecError("registry", shown, f"its files are not whole ({error})") from error
    previous = version.tags.get(_PREVIOUS)
    return ChampionRecord(
        name=str(version.name),
        version=int(version.version),
        model_id=_model_id(version),
        head_uri=directory,
        fingerprint=version.tags.get("target_fingerprint", ""),
        previous_champion=int(previous) if previous else None,
        **files,
    )


def _download(config: RunConfig, model_id: str, shown: str) -> str:
    """The model's files in a local directory: in place beside sqlite, else a cached copy."""
    uri = tracking_uri(config)
    source = f"models:/{model_id}"
    try:
        if uri.startswith("sqlite:"):
            return str(download_artifacts(artifact_uri=source, tracking_uri=uri))
        # Folders of later versions may have been added since, so the copy is always renewed.
        cache = Path(config.target.cache_dir).expanduser().absolute() / "registered"
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f"{model_id}.{uuid.uuid4().hex[:8]}.part"
        fresh.mkdir()
        try:
            download_artifacts(artifact_uri=source, tracking_uri=uri, dst_path=str(fresh))
            shutil.copytree(fresh, cache / model_id, dirs_exist_ok=True)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return str(cache / model_id)
    except (MlflowException, OSError) as error:
        first = str(error).splitlines()[0][:160]
        raise JetspecError("registry", shown, f"its files cannot be read ({first})") from error


def _versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{name}'"))


def _version(client: MlflowClient, name: str, version: int) -> ModelVersion:
    try:
        return client.get_model_version(name, str(version))
    except MlflowException as error:
        have = ", ".join(str(v.version) for v in _versions(client, name)) or "none"
        raise JetspecError(
            "version", version, f"not registered under {name} (there are: {have})"
        ) from error


def _name_exists(client: MlflowClient, name: str) -> bool:
    return bool(client.search_registered_models(filter_string=f"name = '{name}'"))


def _aliased(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _model_id(version: ModelVersion) -> str:
    return str(version.source).removeprefix("models:/")


def _folder(content: str) -> str:
    return f"evaluation-{content[:12]}"


def _describe(version: ModelVersion) -> Version:
    tags = dict(version.tags)
    return Version(
        name=str(version.name),
        version=int(version.version),
        model_id=_model_id(version),
        aliases=tuple(version.aliases),
        created=int(version.creation_timestamp),
        metrics=json.loads(tags.pop(_METRICS, "{}")),
        tags=tags,
    )
