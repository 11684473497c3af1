"""What replies count in the means of papers that weigh them otherwise than their methods do."""

from dataclasses import dataclass

from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class Unweighted(Wrapper):
    """The inner method, whose server knows no n_k: plain means, clients without examples count too."""

    paper = "Shen et al. 2023"  # footnote 2
    kind = "global"

    inner: Method

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)._replace(weight=1.0)


@dataclass(frozen=True)
class ByExamples(Wrapper):
    """The inner method, its replies, where they count at all, weighted by n_k."""

    paper = "Ni et al. 2022"  # §4.1.3
    kind = "global"

    inner: Method

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        reply = self.inner.client_update(task, broadcast, client, data)
        return reply._replace(weight=reply.weight * data.size)
