import torch

from apiece import Recipe, Rule
from apiece.engines.sequential import Sequential
from apiece.engines.vectorized import Vectorized
from apiece.methods.fedavg import FedAvg
from apiece.methods.reptile import Reptile
from tests.worlds import CPU, federation, linear_net, servers


def test_on_equal_clients_it_is_fedavg() -> None:
    """Clients of 12 with batch 4: 6 steps are 2 epochs, and equal weights are no weights."""
    recipe = {"lr": 0.1, "batch_size": 4}
    reptile = Reptile(local=Recipe(**recipe, steps=6))
    fedavg = FedAvg(local=Recipe(**recipe, epochs=2))
    ends = []
    for method in (reptile, fedavg):
        training, server = federation(method, Vectorized(CPU, 8), (12, 12, 12), 2)
        ends.append(list(servers(training, server, 3))[-1].params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-6, atol=1e-7)


def test_small_and_large_clients_count_alike_and_step_alike() -> None:
    """θ_K − θ = −β Σ_j g_j for each client, and the server moves by ε times their unweighted mean."""
    steps, lr, outer = 3, 0.1, 0.5
    method = Reptile(local=Recipe(lr=lr, batch_size=0, steps=steps), outer=Rule("sgd", lr=outer))
    training, server = federation(method, Sequential(CPU), (2, 20), 2, linear_net)
    data = training.federation.data
    total = {name: torch.zeros_like(p) for name, p in server.params.items()}
    for client in range(2):
        model = linear_net()
        model.load_state_dict(dict(server.params))
        rows = torch.as_tensor(data.train[client])
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(model(data.x[rows]), data.y[rows])
            for (name, p), g in zip(
                model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                total[name] -= lr * g
                p.data -= lr * g
    (after,) = servers(training, server, 1)
    for name, p in server.params.items():
        torch.testing.assert_close(after.params[name], p + outer * total[name] / 2, rtol=1e-5, atol=1e-6)
