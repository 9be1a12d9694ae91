"""What must be settled before torch and the kernels are imported.

Several test processes share two cores: one thread each. Triton decides when a kernel is decorated
whether it runs in the interpreter, and any test file may be the first to import the kernels.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's interpreter patches its language at every launch and every call inside a kernel,
    half of a small test's time: here it does so once a module, and leaves it so."""
    done: set[int] = set()

    def once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in done:
            done.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    return once


interpreter._patch_lang = patched_once(interpreter._patch_lang)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that short ones fill the gaps at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
