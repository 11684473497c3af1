"""Experiment: one full description of a run, as a plain dataclass and as TOML."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from apiece import catalog
from apiece.augment import AUGMENTATIONS
from apiece.data.federated import PICKS, TESTERS
from apiece.errors import ApieceError, unknown
from apiece.method import Method, Wrapper
from apiece.methods.local import Local
from apiece.sample import SAMPLERS
from apiece.settings import convert, to_toml

AUTO = "auto"
ENGINES = (
    AUTO,
    "sequential",
    "vectorized",
    "processes",
    "processes(vectorized)",
    "ray",
    "ray(sequential)",
    "ray(vectorized)",
)
NOT_TOML = {  # what else may be given where an experiment's file is, and the way in for it
    **dict.fromkeys((".csv", ".npz", ".parquet"), "for data of your own there is --data {}"),
    ".py": "for a method of your own there is --method {}:ITS_CLASS",
}
PROXY = 0.02  # where a method needs a proxy set and none was asked for


@dataclass(frozen=True)
class Experiment:
    """What to run. Two runs of one experiment on one machine give the same files."""

    method: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method; `lr` is short for `local.lr`
    data: str = "digits"  # a dataset's name, or a path to your own
    data_dir: str = ""  # the folder of datasets' files; else APIECE_DATA says it, else ~/.cache/apiece
    client_column: str = "client"
    label_column: str = "label"
    model: str = "mlp"
    augment: str = "none"  # of images, in training: crop_flip
    clients: int = 30
    partition: str = "auto"  # natural clients where the data has them, else classes:4
    partition_seed: int = 0
    test: float = 0.25  # share of each client's examples held out; 0: the data's own test examples
    testers: str = "all"  # who holds examples out: all clients, or the unseen ones alone
    unseen: float = 0.2  # share of clients that never train; from 1 on their number
    unseen_pick: str = "random"  # which clients those are: drawn, or the last
    proxy: float = 0.0  # share of the seen clients' training examples that becomes the server's
    also: tuple[str, ...] = ()  # other datasets to score as well, their clients as newcomers
    start: str = ""  # a run's folder or a .safetensors file to start from; else drawn from the seed
    prior: str = ""  # likewise: the prior model of methods that keep to one
    rounds: int = 50
    cohort: int = 10
    sampler: str = "uniform"  # or one that takes client drift, period drift or both away
    seed: int = 0
    engine: str = AUTO
    device: str = AUTO
    chunk: int = 64  # clients per chunk at the most
    precision: str = "tf32"  # of products on a GPU: tf32, fp32 or bf16; on a CPU always fp32
    threads: int = 0  # CPU threads; 0: as many as a short measurement finds fastest
    processes: int = 0  # of `processes`, of one thread each; of `ray`, actors; 0: one for each CPU, or GPU
    address: str = ""  # of the Ray cluster; else RAY_ADDRESS says it, else one is begun on this machine
    store: str = AUTO  # client states: memory, mapped (on disk), or auto
    evaluate_every: int = 10
    evaluate_last: int = 0  # and after each of so many last rounds
    evaluate_group: str = "all"  # who is scored: all clients, the seen or the unseen ones
    evaluate_clients: int = 0  # how many of them, always the same ones; 0: all
    evaluate_at_end: int = -1  # how many after the last round; -1: as before it
    checkpoint_every: int = 10
    target: float = 0.8  # for the rounds-to-target figure
    on_nan: str = "stop"  # or skip: drop such an update and count it

    def __post_init__(self) -> None:
        for name in ("test", "unseen", "proxy", "target"):
            # A file gives 900 back as 900.0: the run's id must not hang on how a number was written.
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, least in (
            ("rounds", 1),
            ("cohort", 1),
            ("clients", 1),
            ("chunk", 1),
            ("threads", 0),
            ("processes", 0),
            ("evaluate_every", 1),
            ("evaluate_last", 0),
            ("evaluate_clients", 0),
            ("evaluate_at_end", -1),
            ("checkpoint_every", 1),
        ):
            if getattr(self, name) < least:
                raise ApieceError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0.0 <= self.target <= 1.0:
            raise ApieceError(f"target is a score between 0 and 1, 0.8 for 80 %, got {self.target:g}")
        if self.engine.startswith("processes") and self.threads > 1:
            raise ApieceError("each of the processes has one thread: leave --threads out")
        for name, options in (
            ("on_nan", ("stop", "skip")),
            ("testers", TESTERS),
            ("unseen_pick", PICKS),
            ("augment", tuple(AUGMENTATIONS)),
            ("store", (AUTO, "memory", "mapped")),
            ("engine", ENGINES),
            ("sampler", tuple(SAMPLERS)),
            ("precision", ("tf32", "fp32", "bf16")),
            ("evaluate_group", ("all", "seen", "unseen")),
        ):
            if getattr(self, name) not in options:
                raise unknown(name, getattr(self, name), options)

    @property
    def id(self) -> str:
        """The run's id: a hash of everything above, but not of where the data and the cluster are."""
        text = json.dumps({**asdict(self), "data_dir": "", "address": ""}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def build_method(self) -> Method:
        return catalog.build(self.method, self.settings)

    def with_proxy(self) -> Experiment:
        """This experiment with a small proxy set if its method cannot do without one."""
        needed = self.proxy == 0.0 and self.build_method().needs_proxy
        return replace(self, proxy=PROXY) if needed else self

    def resolved(self, seen_clients: int, partition: str) -> Experiment:
        """This experiment with all that the data decides and every setting written out."""
        settings, method = copy.deepcopy(dict(self.settings)), self.build_method()
        own, inner = settings, method
        while isinstance(inner, Wrapper):
            own, inner = own.setdefault("inner", {}), inner.inner
        if isinstance(inner, Local) and "epochs" not in own.get("personal", {}):
            average = round(self.rounds * self.cohort / seen_clients * method.local.epochs)
            own["personal"] = {**own.get("personal", {}), "epochs": max(1, average)}
            method = catalog.build(self.method, settings)
        return replace(self, partition=partition, settings=catalog.settings_of(method))

    def to_toml(self) -> str:
        return to_toml(asdict(self)) + "\n"


def from_table(table: Mapping[str, Any], base: Experiment | None = None) -> Experiment:
    """An experiment from plain values, checked; what is absent comes from `base` or the defaults."""
    hints = get_type_hints(Experiment)
    for key in table:
        if key not in hints:
            raise unknown("key of an experiment", key, hints)
    values = {key: convert(value, hints[key], key) for key, value in table.items() if key != "settings"}
    if "settings" in table:
        if not isinstance(table["settings"], Mapping):
            raise ApieceError(f"settings must be a table, got {table['settings']!r}")
        values["settings"] = dict(table["settings"])
    return replace(base or Experiment(), **values)


def read(path: Path, base: Experiment | None = None) -> Experiment:
    if path.suffix in NOT_TOML:
        raise ApieceError(f"{path} describes no experiment: {NOT_TOML[path.suffix].format(path)}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ApieceError(f"cannot read the experiment {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ApieceError(f"{path} is not valid TOML: {error}") from error
    return from_table(table, base)


KEYS = tuple(f.name for f in fields(Experiment))
