"""When a run that follows the target goes ahead, and what it starts from."""

from pathlib import Path

import pytest

from flows import nightly, registered, registry
from jetspec.config import parse_config
from jetspec.targets import load


def test_no_champion_means_go_from_scratch() -> None:
    decision = nightly.decide("a" * 64, None, None)
    assert decision.go
    assert decision.warm_start is None


def test_an_unchanged_target_is_skipped() -> None:
    decision = nightly.decide("a" * 64, 3, "a" * 64)
    assert not decision.go
    assert decision.champion_version == 3


def test_a_changed_target_starts_from_the_champion() -> None:
    decision = nightly.decide("b" * 64, 3, "a" * 64)
    assert decision.go
    assert "aaaaaaaaaaaa" in decision.reason
    assert "bbbbbbbbbbbb" in decision.reason
    config = nightly.following(parse_config({}), decision)
    assert config.training.warm_start == "champion"
    assert config.training.epochs == parse_config({}).training.epochs


def test_the_champion_is_a_better_start_than_the_shipped_head() -> None:
    config = parse_config({"training": {"warm_start": "shipped"}})
    decision = nightly.decide("b" * 64, 3, "a" * 64)
    assert nightly.following(config, decision).training.warm_start == "champion"
    first = nightly.decide("b" * 64, None, None)
    assert nightly.following(config, first).training.warm_start == "shipped"


def test_a_start_that_the_run_file_names_is_kept() -> None:
    config = parse_config({"training": {"warm_start": "/heads/mine"}})
    decision = nightly.decide("b" * 64, 3, "a" * 64)
    assert nightly.following(config, decision).training.warm_start == "/heads/mine"


def test_the_targets_own_fingerprint_is_compared_and_a_skip_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config({"storage": str(tmp_path)})
    champion = registered.ChampionRecord(
        "jetspec-x", 4, "m", str(tmp_path), "f" * 64, {}, {}, [], {}, [], None
    )
    monkeypatch.setattr(registry, "champion", lambda config: champion)
    monkeypatch.setattr(load, "target_fingerprint", lambda target: "f" * 64)
    decision = nightly.check_target(config)
    assert not decision.go

    from flows.tracking import connect

    run = connect(config).get_run(nightly.record_skip(config, decision))
    assert run.info.status == "FINISHED"
    assert run.data.tags["jetspec.outcome"] == "skipped"
    assert run.data.tags["champion_version"] == "4"
