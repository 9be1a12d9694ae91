"""The matrix over Ray actors, and what becomes of cells whose worker dies."""

import os
from pathlib import Path

import pytest

from flows.cluster import connect
from flows.evaluate import EvaluationWorker, evaluate_with_ray, placement, run_cells
from jetspec.config import RayConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.matrix import finish, make_plan, pending, read_records
from tests.tiny_run import tiny_run


@pytest.fixture(scope="module")
def ray_cluster():
    with connect(RayConfig(cpus=2)):
        yield


class Fragile(EvaluationWorker):
    """Dies at its first call ever, which a file remembers, and on every tree cell by itself."""

    def measure(self, plan, cells):
        mark = Path(plan.uri) / "died"
        first = not mark.exists()
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        if first or any(cell.method == "tree" for cell in cells):
            os._exit(1)
        super().measure(plan, cells)


def test_ray_gives_the_records_of_the_whole_matrix(ray_cluster, tmp_path):
    config, head = tiny_run(tmp_path, slices=["math"])
    seen = []
    result = evaluate_with_ray(config, head, lambda *progress: seen.append(progress))
    records = read_records(result.uri)
    assert [r["method"] for r in records] == ["plain", "hf_eager", "lookup", "chain", "tree"]
    assert all(r["status"] == "ok" and r["output_check"]["passed"] for r in records)
    assert all(r["speedup"]["vs_plain"]["same_run"] for r in records)
    assert [(done, total) for done, total, _ in seen] == [(i, 5) for i in range(1, 6)]
    assert evaluate_with_ray(config, head).reused


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_the_cell_that_kills_each_is_a_row(ray_cluster, tmp_path):
    config, head = tiny_run(tmp_path, slices=["math"])
    plan = make_plan(config, head)
    seen = []
    run_cells(plan, pending(plan), config, head, lambda *progress: seen.append(progress), Fragile)
    (Path(plan.uri) / "died").unlink()
    result = finish(plan, config)
    rows = {r["method"]: r for r in read_records(result.uri)}
    assert rows["tree"]["status"] == "failed"
    assert "its worker died 2 times" in rows["tree"]["reason"]
    assert all(rows[m]["status"] == "ok" for m in ("plain", "hf_eager", "lookup", "chain"))
    assert rows["chain"]["speedup"]["vs_plain"]["value"] > 0
    assert len(seen) == 5 and seen[-1][:2] == (5, 5)


def test_a_users_mistake_inside_a_worker_reaches_the_driver_as_it_is(ray_cluster, tmp_path):
    config, head = tiny_run(tmp_path, slices=["math"])
    plan = make_plan(config, head)
    (Path(head) / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(JetspecError, match="head|safetensors"):
        run_cells(plan, pending(plan), config, head)


def test_two_workers_never_share_a_core_or_a_gpu():
    assert placement(None, {"CPU": 2.0}) == (1, {"num_cpus": 2}, 2)
    assert placement(2, {"CPU": 8.0}) == (2, {"num_cpus": 4}, 4)
    assert placement(None, {"CPU": 16.0, "GPU": 4.0})[0] == 4
    assert placement(2, {"CPU": 16.0, "GPU": 4.0})[1]["num_gpus"] == 1


@pytest.mark.parametrize("cluster", [{"CPU": 2.0}, {"CPU": 64.0, "GPU": 2.0}])
def test_more_workers_than_the_cluster_can_measure_apart_are_refused(cluster):
    with pytest.raises(JetspecError, match="evaluation.workers: 3"):
        placement(3, cluster)
