"""`python -m jetspec.engine.benchmarks [TABLE ...] [--json FILE]`: measure the engine's rounds."""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROWS = [
    "ar_b1", "ar_b16", "lookup_b1", "lookup_b16", "chain_b1", "chain_b16", "tree_b1_16",
    "tree_b1_64", "tree_b1_128", "tree_b1_255", "tree_b16_16", "tree_b16_32",
]  # fmt: skip
FLOOR_ROWS = (1, 16, 17, 64, 65, 80, 128, 129, 136, 144, 160, 192, 256, 272, 512, 528)
CONTEXTS = (2048, 4096, 8192, 16384, 32768)
TABLES = (
    "rows", "host", "split", "kernels", "overlap", "attention", "exact", "floors", "growth",
    "regeneration", "variants", "clocks",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jetspec.engine.benchmarks", description=__doc__
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--rows", nargs="*", default=ROWS, metavar="ROW")
    parser.add_argument("--layers", type=int, default=36, help="of the random target")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="N processes compile")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("device: none: these tables need a CUDA GPU", file=sys.stderr)
        return 1
    unknown = sorted(set(args.tables) - set(TABLES))
    if unknown:
        print(f"table: {unknown[0]}: choose from {', '.join(TABLES)}", file=sys.stderr)
        return 2
    prepared: list[dict[str, object]] = []
    started = time.perf_counter()
    if args.compile:
        from jetspec.engine.benchmarks.warm import KIND_ROWS, attempt

        alone = not set(args.tables or TABLES) - {"variants", "clocks"}
        jobs = [] if alone else [(name, "plain") for name in args.rows]
        for kind, names in KIND_ROWS.items():
            jobs += [(name, kind) for name in names if kind in args.tables]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            if "variants" in args.tables:
                from jetspec.engine.benchmarks import variants

                prepared = pool.map(variants.prepare, variants.jobs(), chunksize=1)
            pool.map(attempt, jobs, chunksize=1)
        if args.compile_only:
            return 0
        print(f"   compiled in {time.perf_counter() - started:.0f} s", flush=True)
    Runner(args, prepared).run(args.tables or list(TABLES))
    return 0


class Runner:
    """Runs tables over one target; every table that raises says so and the next one runs."""

    def __init__(self, args: argparse.Namespace, prepared: list[dict[str, object]]) -> None:
        from jetspec.engine.benchmarks.models import random_head, random_target
        from kernels.benchmarks.timing import environment

        self.names, self.path, self.prepared = args.rows, args.json, prepared
        torch.manual_seed(0)
        self.target = random_target(args.layers)
        self.head = random_head(self.target)
        self.record: dict[str, object] = {
            "command": " ".join(["python -m jetspec.engine.benchmarks", *sys.argv[1:]]),
            "shapes": f"Qwen3-8B, {args.layers} layers, random bf16 weights, context 1,024",
            "environment": environment(),
        }

    def run(self, tables: list[str]) -> None:
        for name in tables:
            started = time.perf_counter()
            print(f"== {name}", flush=True)
            rows: list[dict[str, object]] = []
            self.record[name] = rows
            table: Callable[[list[dict[str, object]]], None] = getattr(self, name)
            try:
                table(rows)
            except Exception as error:
                rows.append({"failed": f"{type(error).__name__}: {error}"[:400]})
                print("FAILED", name, rows[-1]["failed"], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            print(f"   {time.perf_counter() - started:.0f} s", flush=True)
            self._save()

    def _save(self) -> None:
        if self.path:
            self.path.write_text(json.dumps(self.record, indent=1))

    def _keep(self, rows: list[dict[str, object]], row: dict[str, object]) -> None:
        rows.append(row)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{k} {v}" for k, v in shown.items() if k != "kernels"), flush=True)
        self._save()

    def rows(self, out: list[dict[str, object]]) -> None:
        from jetspec.engine.benchmarks.rows import measure

        for row in measure(self.names, self.target, self.head):
            self._keep(out, row)

    def host(self, out: list[dict[str, object]]) -> None:
        from jetspec.engine.benchmarks.rows import host

        self._keep(out, {"row": "tree_b1_128", **host(self.target, self.head)})
        self._keep(out, {"row": "ar_b1", **host(self.target, None, 200)})

    def split(self, out: list[dict[str, object]]) -> None:
        from jetspec.engine.benchmarks.split import steps

        for name in ("ar_b1", "chain_b1", "tree_b1_128", "tree_b1_255", "tree_b16_16"):
            head = None if name.startswith("ar") else self.head
            self._keep(out, steps(name, self.target, head))

    def kernels(self, out: list[dict[str, object]]) -> None:
        from jetspec.engine.benchmarks.split import kernels
        from jetspec.engine.benchmarks.warm import TRACED

        for name in TRACED:
            self._keep(out, kernels(name, self.target, self.head))

    def overlap(self, out: list[dict[str, object]]) -> None:
        """The same rows without programmatic dependent launch."""
        from jetspec.engine.benchmarks.rows import measure
        from kernels.launch import overlap

        with overlap(False):
            for row in measure(["ar_b1", "chain_b1", "tree_b1_128"], self.target, self.head):
                self._keep(out, row)

    def attention(self, out: list[dict[str, object]]) -> None:
        """Launch shapes of attention in whole rounds."""
        from jetspec.engine.benchmarks.rows import measure
        from jetspec.engine.benchmarks.warm import KIND_ROWS, RULES, ruled

        for name in KIND_ROWS["attention"]:
            for rule in RULES:
                with ruled(rule):
                    for row in measure([name], self.target, self.head):
                        self._keep(out, row | {"rule": rule})

    def exact(self, out: list[dict[str, object]]) -> None:
        """What the bitwise mode costs, without and with cuBLAS where its bits are the same."""
        from jetspec.engine.benchmarks.rows import measure
        from jetspec.engine.benchmarks.warm import KIND_ROWS
        from jetspec.engine.layers import Products

        for tried in (False, True):
            products = Products(exact=True, tried=tried)
            for row in measure(KIND_ROWS["exact"], self.target, self.head, products=products):
                self._keep(out, row | {"tried": tried})

    def floors(self, out: list[dict[str, object]]) -> None:
        """The target's linear layers alone, by the rows of a pass, in both libraries of cuBLAS."""
        from jetspec.engine.benchmarks.rows import engine_for
        from jetspec.engine.benchmarks.split import graph_ms, linears

        engine = engine_for("ar_b1", self.target, None)
        before = torch.backends.cuda.preferred_blas_library()
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            for rows in FLOOR_ROWS:
                ms = graph_ms(linears(engine, rows))
                self._keep(out, {"rows": rows, "library": library, "ms": ms})
        torch.backends.cuda.preferred_blas_library(before)

    def variants(self, out: list[dict[str, object]]) -> None:
        """Remedies beside the present kernels and rounds; what fails its check is not timed."""
        from jetspec.engine.benchmarks import variants
        from kernels.benchmarks.variants import attention_rows, head_rows

        checks = [job for job in variants.jobs() if job[0] != "row"]
        prepared = self.prepared or [variants.prepare(job) for job in checks]
        wrong = [row for row in prepared if not row["passed"]]
        self.record["checks"] = prepared
        print(f"{len(prepared) - len(wrong)} checks and compilations passed")
        for row in wrong:
            print("CHECK FAILED", row, flush=True)
        names = frozenset(str(row["launch"]) for row in wrong)
        rules = frozenset(name.split(": ")[-1] for name in names)
        for table in (
            variants.rounds(self.target, self.head, rules), attention_rows(names), head_rows(),
        ):  # fmt: skip
            for row in table:
                self._keep(out, row)

    def clocks(self, out: list[dict[str, object]]) -> None:
        """Whether rounds of many rows wait for launches or for the clock."""
        from jetspec.engine.benchmarks.variants import clocks

        for row in clocks(self.target, self.head):
            self._keep(out, row)

    def regeneration(self, out: list[dict[str, object]]) -> None:
        """Many prompts at once, against the transformers backend."""
        from jetspec.engine.benchmarks.regeneration import rates

        for batch in (64, 512):
            for row in rates(self.target, batch):
                self._keep(out, row)

    def growth(self, out: list[dict[str, object]]) -> None:
        """A round against context, budget and batch beyond the other rows, with the memory used."""
        from jetspec.engine.benchmarks.rows import measure
        from jetspec.engine.benchmarks.warm import KIND_ROWS

        for context in CONTEXTS:
            for row in measure(["ar_b1", "tree_b1_128"], self.target, self.head, context=context):
                self._keep(out, row | {"context": context})
        for row in measure(KIND_ROWS["growth"], self.target, self.head):
            self._keep(out, row)


if __name__ == "__main__":
    sys.exit(main())
