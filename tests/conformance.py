"""The conformance suite on a device, with a log: `python -m tests.conformance --device cuda --log FILE`.

Every registered method passes check_method there, and a run on digits agrees between the engines and with
the CPU. For machines that CI does not have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from apiece import Experiment, __version__, catalog, run
from apiece.check import examine


def every_method() -> list[str]:
    return [catalog.example(name) for name in catalog.names()]


def rules(name: str, device: str) -> dict[str, str] | str:
    """The rules a method breaks, or how many it keeps."""
    findings = examine(catalog.build(name, {}), device)
    broken = {finding.rule: finding.detail for finding in findings if not finding.ok}
    return broken or f"{len(findings)} rules kept"


def server_params(engine: str, device: str, model: str) -> dict[str, torch.Tensor]:
    experiment = Experiment(
        model=model,
        rounds=5,
        partition="dirichlet:0.3",
        engine=engine,
        device=device,
        threads=1,
        precision="fp32",
    )
    return {name: p.double().cpu() for name, p in run(experiment).server.params.items()}


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def hardware(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    begin = time.time()
    log: dict[str, Any] = {
        "commit": options.commit or subprocess.getoutput("git rev-parse HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(options.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "apiece": __version__,
        "check_method": {},
        "gaps": {},
    }
    failed = False
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn) as pool:
        for name, kept in zip(
            every_method(), pool.map(rules, every_method(), repeat(options.device)), strict=True
        ):
            log["check_method"][name] = kept
            failed = failed or not isinstance(kept, str)
    for model in ("mlp(dropout=0.3)", "cnn"):
        on_cpu = server_params("sequential", "cpu", model)
        for engine in ("sequential", "vectorized"):
            found = gap(server_params(engine, options.device, model), on_cpu)
            log["gaps"][f"{model} on digits, 5 rounds, {engine} against sequential on the CPU"] = found
            failed = failed or not found <= 1e-5
    log["seconds"] = round(time.time() - begin, 1)
    log["verdict"] = "failed" if failed else "passed"
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text(json.dumps(log, indent=2) + "\n")
    print(json.dumps(log, indent=2))
    sys.exit(failed)


if __name__ == "__main__":
    main()
