"""`python -m kernels.benchmarks [TABLE ...] [--json FILE]`: measure the kernels on this GPU."""

import argparse
import json
import sys
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("device: none: these tables need a CUDA GPU", file=sys.stderr)
        return 1
    from kernels.benchmarks import attention, checks, features, gemm, round, sweep
    from kernels.benchmarks.timing import environment

    tables = {
        "attention": lambda: attention.rows(not args.no_peers),
        "gemm": lambda: gemm.rows(not args.no_peers),
        "topk": lambda: round.topk_rows(not args.no_peers),
        "tree_build": lambda: round.tree_rows(not args.no_peers),
        "compaction": lambda: round.compaction_rows(not args.no_peers),
        "fusions": lambda: round.fusion_rows(not args.no_peers),
        "exact_attention": features.exact_rows,
        "exact_products": gemm.exact_rows,
        "fp8": features.fp8_rows,
        "edges": features.edge_rows,
        "experts": features.expert_rows,
        "lookup": features.lookup_rows,
        "sweep_attention": sweep.attention_rows,
        "sweep_parts": sweep.part_rows,
        "sweep_gemm": sweep.gemm_rows,
    }
    wanted = args.tables or [name for name in tables if not name.startswith("sweep")]
    unknown = sorted(set(wanted) - set(tables))
    if unknown:
        print(f"table: {unknown[0]}: choose from {', '.join(tables)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    record: dict[str, object] = {
        "command": " ".join(["python -m kernels.benchmarks", *sys.argv[1:]]),
        "environment": environment(),
    }

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))

    if any(name.startswith("sweep") for name in wanted):
        sweep.compile_all(wanted)
    record["checks"] = found = checks.run()
    save()
    failed = [check for check in found if not check["passed"]]
    for check in failed:
        print("CHECK FAILED", check)
    for name in wanted:
        print(f"== {name}", flush=True)
        rows: list[dict[str, object]] = []
        record[name] = rows
        for row in tables[name]():
            rows.append(row)
            print("  ".join(_cell(*pair) for pair in row.items()), flush=True)
        save()
        if name == "sweep_attention":
            print("chosen:", *sweep.choose(rows), flush=True)
    return 1 if failed else 0


def _cell(name: str, value: object) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


if __name__ == "__main__":
    sys.exit(main())
