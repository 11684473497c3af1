"""Methods by name: one paper, one file, one line here. Composed ones stand among the wrappers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

METHODS = {
    "admm_fedmeta": "apiece.methods.admm_fedmeta:ADMMFedMeta",
    "apfl_ewc": "apiece.methods.apfl_ewc:ApflEwc",
    "apfl_mixture": "apiece.methods.apfl_mixture:ApflMixture",
    "centralized": "apiece.methods.centralized:Centralized",
    "ditto": "apiece.methods.ditto:Ditto",
    "fedavg": "apiece.methods.fedavg:FedAvg",
    "fedbabu": "apiece.methods.fedbabu:FedBABU",
    "fedbn": "apiece.methods.fedbn:FedBN",
    "fedcurv": "apiece.methods.fedcurv:FedCurv",
    "feddf": "apiece.methods.feddf:FedDF",
    "feddyn": "apiece.methods.feddyn:FedDyn",
    "fedec": "apiece.methods.fedec:FedEC",
    "fedmeta_proxy": "apiece.methods.fedmeta_proxy:FedMetaProxy",
    "fednova": "apiece.methods.fednova:FedNova",
    "fedopt": "apiece.methods.fedopt:FedOpt",
    "fedpa": "apiece.wrappers.fedpa:FedPA",
    "fedper": "apiece.methods.fedper:FedPer",
    "fedprox": "apiece.methods.fedprox:FedProx",
    "fedrep": "apiece.methods.fedrep:FedRep",
    "ifca": "apiece.methods.ifca:IFCA",
    "l2gd": "apiece.methods.l2gd:L2GD",
    "lg_fedavg": "apiece.methods.lg_fedavg:LGFedAvg",
    "local": "apiece.methods.local:Local",
    "maml": "apiece.methods.maml:MAML",
    "meta_sgd": "apiece.methods.meta_sgd:MetaSGD",
    "per_fedavg": "apiece.methods.per_fedavg:PerFedAvg",
    "personalized_fedavg": "apiece.wrappers.personalized_fedavg:PersonalizedFedAvg",
    "pfedme": "apiece.methods.pfedme:PFedMe",
    "reptile": "apiece.methods.reptile:Reptile",
    "scaffold": "apiece.methods.scaffold:Scaffold",
}


class Variant(NamedTuple):
    """A method under a name of its own, for settings that a paper gave one."""

    method: str
    settings: Mapping[str, Any]
    paper: str
    what: str


VARIANTS = {
    "fedadagrad": Variant(
        "fedopt",
        {"optimizer": "adagrad", "b1": 0.0, "eta": 0.1},
        "Reddi et al. 2021",
        "FedOpt whose server steps with Adagrad.",
    ),
    "fedadam": Variant(
        "fedopt", {"optimizer": "adam"}, "Reddi et al. 2021", "FedOpt whose server steps with Adam."
    ),
    "fedavgm": Variant(
        "fedavg", {"outer": {"momentum": 0.9}}, "Hsu et al. 2019", "FedAvg whose server steps with momentum."
    ),
    "fomaml": Variant(
        "maml",
        {"first_order": True},
        "Chen et al. 2018",
        "FedMeta with first-order MAML: clients send the query's gradient at their adapted models.",
    ),
    "fedyogi": Variant(
        "fedopt", {"optimizer": "yogi"}, "Reddi et al. 2021", "FedOpt whose server steps with Yogi."
    ),
    "fedsgd": Variant(
        "fedavg",
        {"local": {"batch_size": 0, "steps": 1}},
        "McMahan et al. 2017",
        "FedAvg whose clients take one step on all their examples: one gradient each.",
    ),
}
