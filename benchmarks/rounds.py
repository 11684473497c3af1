"""What a round costs, beside a plain PyTorch loop and other simulators: `python -m benchmarks.rounds`.

A round of FedAvg: 64 clients (16 on a CPU) of 200 random 28x28 images, 62 classes, batches of 20, one epoch.
All rows of a column start from the same model and see the same examples, resident on the device; that they do
the same work is checked by how far the server moves in its first round. After a warm-up, rounds are timed in
blocks, the rows of apiece and of the plain loop by turns, with the device idle before and after each block; a
figure is the median over the blocks. Other simulators run afterwards, each in a process of its own, where
they are installed.

    python -m benchmarks.rounds --json results/rounds-h200.json
    python -m benchmarks.rounds --page docs/performance.md      # fills the page from results/rounds-*.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import torch

from apiece import ApieceError, Experiment, random
from apiece.choice import Choice, pick_device
from apiece.data.federated import Examples
from apiece.data.partition import deal
from apiece.engines.base import Engine, recurring
from apiece.engines.capture import Captured, stairs
from apiece.engines.narrowing import computed
from apiece.engines.vectorized import Vectorized
from apiece.optim import DEFAULT, Recipe
from apiece.prepare import Session, prepare
from benchmarks.peers import SEED, SHAPE, Done, Work, distance, plain
from benchmarks.population import processor

ROOT = Path(__file__).parents[1]
MODELS = {"tff_cnn": "tff_cnn", "lenet": "lenet", "mlp": "mlp(hidden=(512, 256))", "logistic": "logistic"}
ENGINES = ("sequential", "vectorized", "processes", "processes(vectorized)")
POWER_LAW = "power-law"
AUTO, PLAIN, PLAIN_ONE = "ours", "plain PyTorch", "plain PyTorch, 1 thread"
PLAIN_EACH = "plain PyTorch, a process per core, nothing merged"
RAGGED, SAMPLED = "ours, ragged clients", "ours, ragged clients, drawn anew"
PEERS = {  # module, packages it needs, name in the table
    "pfl": ("benchmarks.peers.pfl_research", ("pfl",), "pfl-research"),
    "flower": ("benchmarks.peers.flower", ("flwr", "ray"), "Flower simulation"),
}
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
POWER = "power:1.19"  # the spread of P5's MNIST clients: mean 69, standard deviation 106
SLOW = 500.0  # ms: rounds as long need no long warm-up
ENOUGH = 20_000.0  # ms: a row that has been measured for as long has fewer blocks
TOLERANCE = 0.1  # between the first steps of rows that draw other batches and other masks


@dataclass(frozen=True)
class Plan:
    """How much is measured, and where."""

    device: torch.device
    clients: int
    examples: int
    batch: int
    warm: int
    blocks: int
    seconds: float  # a block lasts about as long, and a round at the least
    threads: int  # of PyTorch, at the most
    small: bool = False

    @staticmethod
    def full(device: torch.device, blocks: int) -> Plan:
        on_gpu = device.type == "cuda"
        return Plan(device, 64 if on_gpu else 16, 200, 20, 3 if on_gpu else 2, blocks, 0.3, cores())

    @staticmethod
    def tiny() -> Plan:
        return Plan(torch.device("cpu"), 2, 8, 4, 1, 1, 0.0, 1, small=True)

    def work(self, model: str) -> Work:
        """The round of a column."""
        clients, batch = self.clients, self.batch
        if model == "logistic" and not self.small:
            clients, batch = 100, 10
        return Work(MODELS[model], (self.examples,) * clients, clients, batch)

    def ragged(self, model: str, population: int = 1) -> Work:
        """Clients of 30 to 100 % as many examples; those of a round drawn from `population` times as many."""
        even = self.work(model)
        draw = np.random.default_rng(SEED)
        sizes = draw.integers(round(0.3 * self.examples), self.examples + 1, population * even.cohort)
        return replace(even, sizes=tuple(sizes.tolist()))

    def power(self) -> Work:
        """P5's MNIST: 1000 clients with a heavy tail, logistic regression, batches of 10; cohorts of 100."""
        clients, cohort = (12, 3) if self.small else (1000, 100)
        return Work("logistic", power_sizes(clients), cohort, 10, classes=10)


def power_sizes(clients: int) -> tuple[int, ...]:
    labels = np.zeros(69 * clients + clients // 28, dtype=np.int64)
    parts, _ = deal(POWER, Examples(labels, labels, 10, ()), clients, SEED)
    return tuple(len(part) for part in parts)


# What is measured


@dataclass
class Row:
    """A row of a column while it is measured."""

    name: str
    rounds: Iterator[Done]
    threads: int
    deterministic: bool  # cuDNN's switch: apiece sets it, others need not
    facts: dict[str, Any] = field(default_factory=dict)
    session: Session | None = None
    per_block: int = 1
    blocks: list[float] = field(default_factory=list)  # ms per round
    cpu: list[float] = field(default_factory=list)  # of them, on the cores of this process and for no child
    examples: list[float] = field(default_factory=list)  # trained on per round

    def run(self, count: int, device: torch.device) -> Done:
        """So many rounds, measured, the device idle before and after; the last of them."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.deterministic = self.deterministic
        torch.backends.cudnn.benchmark = not self.deterministic
        _wait(device)
        begin, busy, examples = time.perf_counter(), time.process_time(), 0
        for _ in range(count):
            done = next(self.rounds)
            examples += done.examples
        _wait(device)
        self.blocks.append(1e3 * (time.perf_counter() - begin) / count)
        self.cpu.append(1e3 * (time.process_time() - busy) / count)
        self.examples.append(examples / count)
        return done

    def forget(self) -> None:
        """What was measured so far was the warm-up."""
        self.blocks, self.cpu, self.examples = [], [], []

    def figures(self) -> dict[str, Any]:
        if self.session is not None and isinstance(engine := self.session.training.engine, Captured):
            self.facts["captures"] = engine.captures
        return {
            "ms": median(self.blocks),
            "rounds_per_block": self.per_block,
            "blocks_ms": self.blocks,
            "blocks_cpu_ms": self.cpu,
            "examples": self.examples,
            "threads": self.threads,
            **self.facts,
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(rows: list[Row], work: Work, plan: Plan, per_block: int = 0) -> None:
    """Warm every row up, then time blocks of rounds, the rows by turns."""
    start = work.network().state_dict()
    for row in rows:
        row.facts["moved"] = distance(start, row.run(1, plan.device).params)
        for _ in range(plan.warm):
            row.run(1, plan.device)
            if row.blocks[-1] > SLOW:
                break
        row.per_block = per_block or min(max(1, round(1e3 * plan.seconds / row.blocks[-1])), 100)
        row.forget()
    for _ in range(plan.blocks):
        for row in rows:
            if sum(row.blocks) * row.per_block < ENOUGH:
                row.run(row.per_block, plan.device)


def prepared(work: Work, plan: Plan, engine: str, choice: Choice | None = None) -> Session:
    """A run of apiece, made ready as `apiece run` would."""
    torch.set_num_threads(plan.threads)
    local = {"lr": work.lr, "batch_size": work.batch, "epochs": work.epochs}
    experiment = Experiment(
        method="fedavg",
        settings={"local": local},
        model=work.model,
        clients=len(work.sizes),
        cohort=work.cohort,
        unseen=0.0,
        test=0.0,
        rounds=500,  # of a run that is worth timing: a tenth of its time, at the most, goes into choosing
        seed=SEED,
        engine=engine,
        device=str(plan.device),
    )
    return prepare(experiment, None, choice, dealt=work.data())


def ours(name: str, session: Session) -> Row:
    facts = {"choice": asdict(session.choice)}
    return Row(name, _rounds(session), session.choice.threads, True, facts, session)


@torch.no_grad()
def _rounds(session: Session) -> Iterator[Done]:
    for closed in session.training.rounds(session.server, 0, sys.maxsize):
        yield Done(int(closed.labels.sum()), closed.server.params)


def plain_rows(work: Work, plan: Plan, cohort: Callable[[int], Sequence[int]] | None = None) -> list[Row]:
    """On a CPU with PyTorch's own number of threads and with one: which is faster depends on the model.

    And by a process for each core: what a pool could gain at the most.
    """
    if plan.device.type != "cpu" or plan.small:
        return [Row(PLAIN, plain.rounds(work, plan.device, cohort), plan.threads, False)]
    return [
        Row(name, plain.rounds_apart(work, threads, cohort, processes), threads, False)
        for name, threads, processes in (
            (PLAIN, plan.threads, 1),
            (PLAIN_ONE, 1, 1),
            (PLAIN_EACH, 1, cores()),
        )
    ]


def without_graphs(session: Session) -> Session:
    engine = Vectorized(session.engine.device, session.engine.limit)
    return replace(session, training=replace(session.training, engine=engine))


def column(model: str, plan: Plan, peers: list[str], profiled: bool) -> dict[str, Any]:
    """All rows of one model."""
    work = plan.work(model)
    auto = prepared(work, plan, "auto")
    rows = [*plain_rows(work, plan), ours(AUTO, auto)]
    missing: dict[str, str] = {}
    on_gpu = plan.device.type == "cuda"
    for engine in ENGINES:
        if on_gpu and engine == auto.choice.engine:
            continue  # the same thing twice: on a CPU they may differ in their threads
        try:
            rows.append(ours(f"ours, {engine}", prepared(work, plan, engine)))
        except ApieceError as error:
            missing[f"ours, {engine}"] = str(error)
    if on_gpu:
        library = replace(auto.choice, layers={})
        rows.append(ours("ours, layers by PyTorch", prepared(work, plan, "auto", library)))
        rows.append(ours("ours, without CUDA graphs", without_graphs(auto)))
    for name, times in ((RAGGED, 1), (SAMPLED, 4)):
        uneven = plan.ragged(model, times)
        rows.append(ours(name, prepared(uneven, plan, "auto", auto.choice)))
        rows[-1].facts["padding"] = waste(uneven, auto.engine)
    measure(rows, work, plan)
    found = {row.name: row.figures() for row in rows}
    found |= {name: {"missing": why} for name, why in missing.items()}
    loops = [row for row in rows if row.name in (PLAIN, PLAIN_ONE)]
    best = min(loops, key=lambda row: median(row.blocks))
    found |= {PEERS[peer][2]: beside(peer, work, plan, best.threads) for peer in peers}
    parameters = sum(p.numel() for p in work.network().parameters())
    facts = {"work": described(work), "parameters": parameters, "rows": found, "ratios": ratios(found)}
    return facts | ({"profile": profile(rows, plan)} if profiled else {})


def power_column(plan: Plan) -> dict[str, Any]:
    """Clients with a heavy tail of sizes: the same cohorts for all rows, each drawn anew."""
    work = plan.power()
    auto = prepared(work, plan, "auto")

    def cohort(index: int) -> Sequence[int]:
        return auto.training.sampler(auto.federation.data, auto.training.round(index)).ids

    rows = [*plain_rows(work, plan, cohort), ours(AUTO, auto)]
    measure(rows, work, plan, per_block=1 if plan.small else 5)
    found = {row.name: row.figures() for row in rows}
    padding = {
        f"cohorts of {size}": waste(replace(work, cohort=size), auto.engine) for size in {10, work.cohort}
    }
    return {"work": described(work), "rows": found, "ratios": ratios(found), "padding": padding}


def described(work: Work) -> dict[str, Any]:
    """The work, with its sizes in short."""
    sizes = work.sizes
    short = {"clients": len(sizes), "mean_size": fmean(sizes), "std_size": pstdev(sizes)}
    return {**asdict(work), **short, "sizes": [min(sizes), max(sizes)], "shape": SHAPE}


def waste(work: Work, engine: Engine, cohorts: int = 100) -> dict[str, float]:
    """Of drawn cohorts: steps computed, and read, per real one; and if all clients took as many as one."""
    recipe = Recipe(batch_size=work.batch, epochs=work.epochs).over(DEFAULT)
    taken, read, whole, chunks = [], [], [], []
    for index in range(cohorts):
        key = random.fold(SEED, "padding", index)
        sizes = [
            work.sizes[i] for i in random.choose(key, min(work.cohort, len(work.sizes)), len(work.sizes))
        ]
        steps = [math.ceil(size / work.batch) for size in sizes]
        parts = engine.cut(sizes, recipe)
        chunks.append(len(parts))
        if not engine.overhead:  # clients are computed one by one: nothing is padded
            parts = [[at] for at in range(len(steps))]
        shapes = [sorted((steps[at] for at in part), reverse=True) for part in parts]
        if isinstance(engine, Captured) and not recurring(sizes):
            shapes = [stairs(shape) for shape in shapes]
        taken.append(sum(computed(shape) for shape in shapes) / sum(steps))
        read.append(sum(shape[0] * len(shape) for shape in shapes) / sum(steps))
        whole.append(len(steps) * max(steps) / sum(steps))
    return {
        "chunks": fmean(chunks),
        "computed": fmean(taken),
        "most_computed": max(taken),
        "read": fmean(read),
        "in_one_rectangle": fmean(whole),
    }


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times as long as ours the others take; ours on ragged clients against their even share."""
    taken = {name: row["ms"] for name, row in rows.items() if "ms" in row}
    found = {}
    for name in (PLAIN, PLAIN_ONE, PLAIN_EACH, *(name for _, _, name in PEERS.values())):
        if name in taken:
            found[f"{name} / ours"] = taken[name] / taken[AUTO]
    engines = [taken[f"ours, {engine}"] for engine in ENGINES if f"ours, {engine}" in taken]
    if engines:
        found["ours / fastest engine"] = taken[AUTO] / min(engines)
    for name in (RAGGED, SAMPLED):
        if name in taken:
            share = taken[AUTO] * fmean(rows[name]["examples"]) / fmean(rows[AUTO]["examples"])
            found[f"{name} / even share"] = taken[name] / share
    return found


def disagreements(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Rows whose server did not move as far as that of ours in the first round: they do other work."""
    moved = {name: row["moved"] for name, row in rows.items() if "moved" in row}
    even = {name: far for name, far in moved.items() if name not in (RAGGED, SAMPLED)}
    return [
        f"{name} moves the server by {far:.4g} in the first round, ours by {moved[AUTO]:.4g}"
        for name, far in even.items()
        if abs(far / moved[AUTO] - 1) > TOLERANCE
    ]


# Other simulators


def beside(peer: str, work: Work, plan: Plan, threads: int) -> dict[str, Any]:
    """A peer's figures, from a process of its own."""
    module, packages, _ = PEERS[peer]
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return {"missing": f"not installed: {', '.join(absent)}"}
    order = {
        "peer": module,
        "work": asdict(work),
        "threads": threads,
        "warm": plan.warm,
        "rounds": plan.blocks,
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(order))
        environment = {**os.environ, **OFFLINE, "FLWR_HOME": folder}
        command = [sys.executable, "-m", "benchmarks.peers", str(asked), str(answer)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            told = done.stderr.strip().splitlines() or ["no message"]
            return {"missing": f"failed: {told[-1]}", "stderr": told[-40:]}
        figures = json.loads(answer.read_text())
    return {"ms": median(figures["blocks_ms"]), "rounds_per_block": 1, **figures, "threads": threads}


# Where the time goes


def profile(rows: list[Row], plan: Plan, rounds: int = 3) -> list[dict[str, Any]]:
    """Of our row, per round: what the device is busy with, the longest first."""
    (row,) = (row for row in rows if row.name == AUTO)
    kinds = torch.profiler.ProfilerActivity
    on_gpu = plan.device.type == "cuda"
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU], acc_events=True) as record:
        row.run(rounds, plan.device)
    found = []
    for event in record.key_averages():
        taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if taken > 0:
            figures = {"ms": taken / 1e3 / rounds, "launches": event.count / rounds}
            found.append({"kernel": event.key[:90], **figures})
    for measured in (row.blocks, row.cpu, row.examples):
        measured.pop()
    return sorted(found, key=lambda line: -line["ms"])


# What is told


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Milliseconds per round, then ratios; the rows that are missing say why below."""
    names = list(dict.fromkeys(name for c in columns.values() for name in c["rows"]))
    told = list(dict.fromkeys(name for c in columns.values() for name in c["ratios"]))
    lines = [f"| ms per round | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    missing: dict[str, None] = {}
    for name in names:
        cells = []
        for c in columns.values():
            row = c["rows"].get(name, {})
            cells.append(_digits(row["ms"]) if "ms" in row else "–")
            if "missing" in row:
                missing[f"{name}: {row['missing']}"] = None
        if set(cells) != {"–"}:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    for name in told:
        cells = [
            f"**{_digits(c['ratios'][name])}×**" if name in c["ratios"] else "–" for c in columns.values()
        ]
        lines.append(f"| *{name}* | {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{line}" for line in missing)])


def _digits(value: float) -> str:
    """Three digits that count."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def padding_table(columns: dict[str, dict[str, Any]]) -> str:
    heads = {
        "chunks": "chunks",
        "computed": "computed",
        "most_computed": "the worst",
        "read": "read",
        "in_one_rectangle": "in one rectangle",
    }
    lines = [
        f"| steps per real step, 100 cohorts | {' | '.join(heads.values())} |",
        "|---|" + "---:|" * len(heads),
    ]
    for name, c in columns.items():
        found = dict(c.get("padding", {}))
        if RAGGED in c["rows"]:
            found["ragged clients"] = c["rows"][RAGGED]["padding"]
        for what, figures in found.items():
            cells = (f"{figures[key]:.2f}" if key in figures else "–" for key in heads)
            lines.append(f"| {name}, {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def profile_table(name: str, lines: list[dict[str, Any]], most: int = 10) -> str:
    total = sum(line["ms"] for line in lines)
    shown = [f"| {name}: busy {total:.2f} ms | ms | launches |", "|---|---:|---:|"]
    for line in lines[:most]:
        kernel = line["kernel"].replace("|", "\\|")
        shown.append(f"| `{kernel}` | {line['ms']:.3f} | {line['launches']:.0f} |")
    rest = lines[most:]
    if rest:
        both = (sum(line[key] for line in rest) for key in ("ms", "launches"))
        shown.append("| {} others | {:.3f} | {:.0f} |".format(len(rest), *both))
    return "\n".join(shown)


def told(facts: dict[str, Any]) -> str:
    """A result file as text: the machine, the table, the padding and, if it was asked for, the profile."""
    machine, versions = facts["machine"], facts["versions"]
    place = machine["gpu"] or f"{machine['cpu']}, cores: {machine['cores']}"
    code = versions["commit"] + (" with changes" if versions["changed"] else "")
    title = (
        f"**{place}**, {facts['date'][:10]}, PyTorch {versions['torch']}, apiece {code}: `{facts['command']}`"
    )
    columns = facts["columns"]
    parts = [title, table(columns), padding_table(columns)]
    parts += [profile_table(name, c["profile"]) for name, c in columns.items() if "profile" in c]
    parts += [f"Beware: {name}: {line}." for name, c in columns.items() for line in disagreements(c["rows"])]
    return "\n\n".join(parts)


def fill(page: str, results: list[dict[str, Any]]) -> str:
    """The page with the results put between its marks."""
    text = "\n\n".join(told(facts) for facts in results)
    marks = r"(<!-- rounds -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def commit() -> tuple[str, bool]:
    """(the commit of this checkout, whether it has changes); on a copy without git: unknown."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short", "HEAD").strip(), bool(git("status", "--porcelain", "src"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def surroundings(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    code, changed = commit()
    packages = (
        "torch",
        "triton",
        "numpy",
        "apiece",
        *(name for _, names, _ in PEERS.values() for name in names),
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.rounds", *arguments]),
        "machine": {
            "cpu": processor(),
            "cores": cores(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "load_before": os.getloadavg(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": code,
            "changed": changed,
        },
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to leave every figure")
    parser.add_argument(
        "--models", choices=[*MODELS, POWER_LAW], nargs="+", help="all of them, logistic on a CPU only"
    )
    parser.add_argument("--with", dest="peers", default=",".join(PEERS), help="other simulators (pfl,flower)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, default=5, help="figures are medians over so many blocks")
    parser.add_argument(
        "--small", action="store_true", help="a few steps of two clients: does it still work?"
    )
    parser.add_argument("--profile", action="store_true", help="also what the device is busy with")
    parser.add_argument("--page", type=Path, help="measure nothing: fill this page from --json or results/")
    options = parser.parse_args(arguments)
    if options.page is not None:
        files = [options.json] if options.json else sorted((ROOT / "results").glob("rounds-*.json"))
        page = fill(options.page.read_text(), [json.loads(file.read_text()) for file in files])
        options.page.write_text(page)
        return
    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--with knows {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
    plan = Plan.tiny() if options.small else Plan.full(pick_device(options.device), options.blocks)
    facts = surroundings(plan.device, sys.argv[1:] if arguments is None else arguments)
    on_cpu = plan.device.type == "cpu"
    names = options.models or [name for name in (*MODELS, POWER_LAW) if on_cpu or name != "logistic"]
    facts["columns"] = {}
    for name in names:
        found = power_column(plan) if name == POWER_LAW else column(name, plan, peers, options.profile)
        facts["columns"][name] = found
        facts["machine"]["load_after"] = os.getloadavg()
        print(f"{name}: {_digits(found['rows'][AUTO]['ms'])} ms", file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    print(told(facts))


if __name__ == "__main__":
    main()
