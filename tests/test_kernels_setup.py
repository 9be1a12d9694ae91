"""Kernels run on the CPU in Triton's interpreter: how the other kernel tests import them."""

import importlib
from pathlib import Path
from types import ModuleType

import torch

import kernels


def interpreted(name: str) -> ModuleType:
    """A `kernels` module whose Triton functions run in the interpreter when there is no GPU."""
    return importlib.import_module(name)


def test_kernels_is_ours_and_not_the_package_of_that_name() -> None:
    assert (
        Path(kernels.__file__).resolve().parent == Path(__file__).resolve().parents[1] / "kernels"
    )


def test_without_a_gpu_the_kernels_are_interpreted() -> None:
    module = interpreted("kernels.norms")
    kind = type(module._add_rms_norm).__name__
    assert kind == ("JITFunction" if torch.cuda.is_available() else "InterpretedFunction")
