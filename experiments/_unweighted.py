"""Every reply counts alike: the means of FedPA, Shen et al. 2023, footnote 2 (the server knows no n_k)."""

from dataclasses import dataclass

from apiece.method import Broadcast, Client, Method, Reply, Wrapper
from apiece.shard import Shard
from apiece.task import Task


@dataclass(frozen=True)
class Unweighted(Wrapper):
    """The inner method, whose server takes plain means; clients without examples count too."""

    paper = "Shen et al. 2023"
    kind = "global"

    inner: Method

    def client_update(self, task: Task, broadcast: Broadcast, client: Client, data: Shard) -> Reply:
        return self.inner.client_update(task, broadcast, client, data)._replace(weight=1.0)
