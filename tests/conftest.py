"""One thread per test process: several test processes would fight over the cores."""

import torch

torch.set_num_threads(1)
