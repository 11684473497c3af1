"""Methods by name: one paper, one file, one line here. Composed ones stand among the wrappers."""

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
