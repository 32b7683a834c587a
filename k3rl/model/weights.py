"""The one kind of parameter holder of the model, so that names end in `.weight` as released."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weight(nn.Module):
    """A parameter of any shape called `weight`; matrices are [out, in]."""

    weight: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
