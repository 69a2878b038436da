"""``python -m benchmarks``: run every bench in its own process and write ``results/<date>-<cpu>.md`` and ``.json``."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from tests.golden.make_golden import ensure_peers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def find_benches() -> list[str]:
    return sorted(path.stem for path in HERE.glob("bench_*.py"))


def run_bench(name: str, quick: bool, scratch: Path) -> dict:
    """One bench in a fresh process of the environment it asks for; its record, as saved by ``harness.main``."""
    module = importlib.import_module(f"benchmarks.{name}")
    peers = getattr(module, "ENVIRONMENT", "") == "peers"
    python = ensure_peers() if peers else Path(sys.executable)
    out = scratch / f"{name}.json"
    command = [str(python), "-m", f"benchmarks.{name}", "--json", str(out), *(["--quick"] if quick else [])]
    # A thread limit meant for the tests would make the peers slower than they are.
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    subprocess.run(command, check=True, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)})
    return json.loads(out.read_text(encoding="utf-8"))


def commit() -> str:
    """The commit measured, with ``+`` if the tree has changes; ``unknown`` outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")


def report(records: dict[str, dict]) -> str:
    lines = ["# Benchmarks", ""]
    for name, record in records.items():
        machine, after = record["before"], record["after"]
        versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
        load = " → ".join("/".join(f"{v:.2f}" for v in m["load_average"] or []) for m in (machine, after))
        lines += [f"## {name}", "", f"Commit {record['commit']}. "]
        lines += [f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}; "]
        lines += [f"{versions}. Load average (1/5/15 min) before → after: {load}.", ""]
        lines += [harness.section_to_markdown(harness.section_from_json(s)) for s in record["sections"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", help="benches to run (default: all)", metavar="bench_x")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written: a smoke test")
    options = parser.parse_args()
    names = options.names or find_benches()
    with tempfile.TemporaryDirectory() as scratch:
        records = {name: run_bench(name, options.quick, Path(scratch)) for name in names}
    if options.quick:
        return
    stamp = datetime.date.today().isoformat()
    slug = re.sub(r"[^a-z0-9]+", "-", harness.cpu_name().lower()).strip("-")
    base = HERE / "results" / f"{stamp}-{slug}"
    base.parent.mkdir(exist_ok=True)
    # A bench run alone replaces its own record of the day; each says which commit it measured.
    path, measured = base.with_suffix(".json"), commit()
    kept = json.loads(path.read_text(encoding="utf-8"))["records"] if path.exists() else {}
    records = dict(sorted({**kept, **{n: {**r, "commit": measured} for n, r in records.items()}}.items()))
    path.write_text(json.dumps({"date": stamp, "records": records}, indent=1) + "\n", encoding="utf-8")
    text = report(records).replace("# Benchmarks\n", f"# Benchmarks, {stamp}\n", 1)
    base.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"wrote {base.relative_to(ROOT)}.md and .json")


if __name__ == "__main__":
    main()
