"""pfl-research (Granqvist et al. 2024): its simulated backend, as in its PyTorch benchmarks.

Its batches come in stored order, which spares it the shuffling of the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers import Work


class _Measured(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.module(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self.module(x), y, reduction="sum").item(), len(y))}


def measure(work: Work, warm: int, rounds: int) -> tuple[list[float], Mapping[str, Tensor]]:
    """(ms of each round behind the warm-up, the server's params after the first of all)."""
    device = pytorch_ops.get_default_device()
    data = work.data().to(device)
    held = {
        client: Dataset(raw_data=(data.x[rows], data.y[rows]), user_id=str(client))
        for client in range(data.population)
        for rows in [torch.as_tensor(data.train[client], device=device)]
    }
    source = FederatedDataset(held.__getitem__, get_user_sampler("minimize_reuse", list(held)))
    module = _Measured(work.network()).to(device)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    backend = SimulatedBackend(source, source, postprocessors=[WeightByDatapoints()])
    times: list[float] = []
    first: dict[str, Tensor] = {}
    algorithm = FederatedAveraging()
    train = NNTrainHyperParams(
        local_batch_size=work.batch, local_num_epochs=work.epochs, local_learning_rate=work.lr
    )
    for index in range(warm + rounds):
        _wait(device)
        begin = time.perf_counter()
        # A run goes on where the last one ended. Its first round also evaluates: the warm-up's.
        params = NNAlgorithmParams(
            central_num_iterations=index + 1,
            evaluation_frequency=10**9,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        )
        algorithm.run(params, backend, model, train, send_metrics_to_platform=False)
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
        first = first or {name: p.detach().clone() for name, p in module.module.state_dict().items()}
    return times[warm:], first


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
