"""Kernels run on the CPU in Triton's interpreter: how the other kernel tests import them."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from triton.runtime import interpreter

import kernels


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
