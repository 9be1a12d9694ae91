"""What Prometheus sees of the pipeline, and that the dashboard asks for nothing else."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from dashboards.exporter import PipelineCollector
from flows.registered import Version
from jetspec.errors import JetspecError

ROOT = Path(__file__).resolve().parent.parent
CHAMPION = Version("jetspec-x", 3, "m", ("champion",), 5000, {"tau": 2.5, "tau_lo": 2.0}, {})


def scrape(flow_runs: Mapping[str, int] | None, champions: Iterable[Version] | None) -> str:
    """A scrape; None stands for a source that is down."""

    def runs() -> Mapping[str, int]:
        if flow_runs is None:
            raise ConnectionRefusedError
        return flow_runs

    def heads() -> Iterable[Version]:
        if champions is None:
            raise JetspecError("tracking.uri", "http://x", "cannot be reached")
        return champions

    registry = CollectorRegistry()
    registry.register(PipelineCollector(runs, heads))
    return generate_latest(registry).decode()


def test_flow_runs_and_the_champions_figures_are_exported() -> None:
    text = scrape({"COMPLETED": 4, "FAILED": 1}, [CHAMPION])
    assert 'jetspec_flow_runs{state="completed"} 4.0' in text
    assert 'jetspec_champion_version{model="jetspec-x"} 3.0' in text
    assert 'jetspec_champion_tau{model="jetspec-x"} 2.5' in text
    assert 'jetspec_champion_created_seconds{model="jetspec-x"} 5.0' in text
    assert "jetspec_champion_tau_hi{" not in text


def test_a_source_that_is_down_is_told_and_hides_nothing_of_the_other() -> None:
    text = scrape(None, [CHAMPION])
    assert 'jetspec_source_up{source="prefect"} 0.0' in text
    assert "jetspec_champion_tau{" in text
    text = scrape({"FAILED": 1}, None)
    assert 'jetspec_source_up{source="mlflow"} 0.0' in text
    assert "jetspec_flow_runs{" in text


def test_the_dashboard_asks_only_for_what_is_exported() -> None:
    exported = set(re.findall(r"^# TYPE (\w+)", scrape({"FAILED": 1}, [CHAMPION]), re.M))
    dashboard = json.loads((ROOT / "dashboards" / "jetspec.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"jetspec_\w+", target["expr"])
    }
    assert asked <= exported
