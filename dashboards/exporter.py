"""A Prometheus exporter of what neither Prefect nor MLflow exports: flow runs by state, champions.

python dashboards/exporter.py --storage runs --port 9109
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated

import typer
from prometheus_client import start_http_server
from prometheus_client.core import REGISTRY, GaugeMetricFamily
from prometheus_client.registry import Collector

from flows import registry, service
from flows.registered import Version
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError

STATES = ("SCHEDULED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_STORAGE: str = RunConfig.model_fields["storage"].default
FIGURES = ("tau", "tau_lo", "tau_hi", "speedup_vs_plain")


class PipelineCollector(Collector):
    """Asks at every scrape; a source that is down is told by `jetspec_source_up`, not by silence.

    Args:
        flow_runs: counts of the flow's runs by state.
        champions: the champion version of every registered model.
    """

    def __init__(
        self,
        flow_runs: Callable[[], Mapping[str, int]],
        champions: Callable[[], Iterable[Version]],
    ) -> None:
        self._flow_runs = flow_runs
        self._champions = champions

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("jetspec_source_up", "1 if the source answered", labels=["source"])
        runs = GaugeMetricFamily("jetspec_flow_runs", "Flow runs by state", labels=["state"])
        version = GaugeMetricFamily("jetspec_champion_version", "Champion", labels=["model"])
        made = GaugeMetricFamily(
            "jetspec_champion_created_seconds", "When it was registered", labels=["model"]
        )
        figures = {
            name: GaugeMetricFamily(f"jetspec_champion_{name}", name, labels=["model"])
            for name in FIGURES
        }
        try:
            for state, count in self._flow_runs().items():
                runs.add_metric([state.lower()], count)
            up.add_metric(["prefect"], 1)
        except (OSError, ValueError):
            up.add_metric(["prefect"], 0)
        try:
            for champion in self._champions():
                version.add_metric([champion.name], champion.version)
                made.add_metric([champion.name], champion.created / 1000)
                for name, family in figures.items():
                    if name in champion.metrics:
                        family.add_metric([champion.name], champion.metrics[name])
            up.add_metric(["mlflow"], 1)
        except JetspecError:
            up.add_metric(["mlflow"], 0)
        yield from (up, runs, version, made, *figures.values())

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: registering must not wait for the sources."""
        return []


def count_flow_runs(api: str) -> dict[str, int]:
    """Runs of the pipeline's flow by state, from Prefect's API."""
    counts = {}
    for state in STATES:
        body = {
            "flows": {"name": {"any_": [service.FLOW]}},
            "flow_runs": {"state": {"type": {"any_": [state]}}},
        }
        request = urllib.request.Request(
            f"{api}/flow_runs/count",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            counts[state] = int(json.loads(response.read()))
    return counts


def list_champions(config: RunConfig) -> list[Version]:
    return [
        version
        for name in registry.names(config)
        for version in registry.versions(config, name)
        if registry.CHAMPION in version.aliases
    ]


def main(
    storage: Annotated[str, typer.Option(help="Where runs keep their output.")] = _STORAGE,
    tracking: Annotated[str | None, typer.Option(help="An MLflow server's URI.")] = None,
    api: Annotated[str, typer.Option(help="Prefect's API.")] = f"http://{service.HOST}:4200/api",
    port: Annotated[int, typer.Option(help="Where Prometheus asks.")] = 9109,
) -> None:
    """Serve /metrics until stopped."""
    config = parse_config({"storage": storage, "tracking": {"uri": tracking}})
    REGISTRY.register(
        PipelineCollector(lambda: count_flow_runs(api), lambda: list_champions(config))
    )
    start_http_server(port)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    typer.run(main)
