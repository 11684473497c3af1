"""Wrappers by name: a method around a method, `elastic(fedavg)`."""

WRAPPERS = {
    "elastic": "apiece.wrappers.elastic:Elastic",
}
