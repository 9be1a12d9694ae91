"""Facts that stand beside every figure: hardware, versions, and how the figure was made."""

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

from jetspec import __version__

_PACKAGES = ("torch", "triton", "transformers", "numpy", "ray", "prefect", "mlflow", "vllm")


def environment() -> dict[str, Any]:
    """Hardware and versions of this process, as plain JSON values."""
    versions = {"jetspec": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    return {
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "cuda": torch.version.cuda if cuda else None,
        "command": _command(),
    }


def _command() -> str | None:
    """How this process was started; None of a Ray worker, whose line names sockets and no run."""
    program = os.path.basename(sys.argv[0])
    return None if program == "default_worker.py" else " ".join([program, *sys.argv[1:]])
