"""Methods by name: one paper, one file, one line here. Composed ones stand among the wrappers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

METHODS = {
    "admm_fedmeta": "apiece.methods.admm_fedmeta:ADMMFedMeta",
    "apfl_ewc": "apiece.methods.apfl_ewc:ApflEwc",
    "centralized": "apiece.methods.centralized:Centralized",
    "fedavg": "apiece.methods.fedavg:FedAvg",
    "fedec": "apiece.methods.fedec:FedEC",
    "fedpa": "apiece.wrappers.fedpa:FedPA",
    "local": "apiece.methods.local:Local",
    "personalized_fedavg": "apiece.wrappers.personalized_fedavg:PersonalizedFedAvg",
    "reptile": "apiece.methods.reptile:Reptile",
}


class Variant(NamedTuple):
    """A method under a name of its own, for settings that a paper gave one."""

    method: str
    settings: Mapping[str, Any]
    paper: str
    what: str


VARIANTS = {
    "fedavgm": Variant(
        "fedavg", {"outer": {"momentum": 0.9}}, "Hsu et al. 2019", "FedAvg whose server steps with momentum."
    ),
    "fedsgd": Variant(
        "fedavg",
        {"local": {"batch_size": 0, "steps": 1}},
        "McMahan et al. 2017",
        "FedAvg whose clients take one step on all their examples: one gradient each.",
    ),
}
