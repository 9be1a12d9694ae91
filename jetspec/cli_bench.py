"""`bench`: every table of measurements by one name, beside the module that makes it."""

import runpy
import sys
from typing import Annotated

import typer

from jetspec.errors import JetspecError

BENCHES = {
    "kernels": ("kernels.benchmarks", "each kernel against its peers and the bytes' floor"),
    "engine": ("jetspec.engine.benchmarks", "rounds, floors, variants, growth, regeneration"),
    "exact-tokens": ("jetspec.engine.benchmarks.exact_tokens", "is the bitwise mode true?"),
    "near-ties": ("jetspec.engine.benchmarks.near_ties", "the engine against the reference loop"),
    "parallel": ("jetspec.engine.benchmarks.parallel", "one target over several GPUs"),
    "training": ("jetspec.training.benchmarks", "the training step, its parts, DDP and FSDP2"),
}
FORWARDED = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],  # they belong to the table that is named
}


def bench(
    ctx: typer.Context,
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="Which; none lists them.")
    ] = None,
) -> None:
    """Measure kernels, the engine or the training step: `bench TABLE -h` tells a table's options.

    What follows the table's name goes to it. Most need a CUDA GPU; `--json FILE` keeps a record.
    """
    if table in (None, "-h", "--help"):
        width = max(map(len, BENCHES))
        for name, (module, what) in BENCHES.items():
            typer.echo(f"{name:{width}}  {what} (python -m {module})")
        return
    if table not in BENCHES:
        raise JetspecError("TABLE", table, f"choose from {', '.join(BENCHES)}")
    module = BENCHES[table][0]
    sys.argv = [module, *ctx.args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
