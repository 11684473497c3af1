"""Methods by name: one paper, one file, one line here."""

METHODS = {
    "centralized": "apiece.methods.centralized:Centralized",
    "fedavg": "apiece.methods.fedavg:FedAvg",
    "local": "apiece.methods.local:Local",
    "reptile": "apiece.methods.reptile:Reptile",
}
