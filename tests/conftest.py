"""What must be settled before torch and the kernels are imported.

Several test processes share two cores: one thread each. Triton decides when a kernel is decorated
whether it runs in the interpreter, and any test file may be the first to import the kernels.
"""

import os
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that short ones fill the gaps at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


FORKING = ("peers", "tensor_parallel", "training_benchmarks", "training_loop")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but files that fork processes share the one that imported for them."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "forking" if file in {f"tests/test_{name}.py" for name in FORKING} else file

    return ByFile(config, log)
