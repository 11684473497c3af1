"""Wrappers by name: a method around a method, `elastic(fedavg)`."""

WRAPPERS = {
    "elastic": "apiece.wrappers.elastic:Elastic",
    "guarded": "apiece.wrappers.guarded:Guarded",
    "learned_aggregation": "apiece.wrappers.learned_aggregation:LearnedAggregation",
    "stages": "apiece.wrappers.stages:Stages",
}
