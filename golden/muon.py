"""Muon for the matrices, AdamW for the rest, and a learning rate that follows the clock.

Muon: momentum, then a Newton-Schulz iteration that moves every singular value of the update
towards 1 (K. Jordan 2024), scaled by 0.2 * sqrt(larger side) so that AdamW's learning rates fit
(J. Liu et al. 2025).
"""

import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Muon:
    def __init__(
        self, matrices: list[nn.Parameter], rate: float, decay: float, momentum: float = 0.95
    ):
        self.rate, self.momentum, self.decay = rate, momentum, decay
        groups = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape[-2:]].append(matrix)
        self.groups = list(groups.values())
        self.buffers = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        rate = self.rate * factor
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
            ahead = torch._foreach_lerp(gradients, buffers, self.momentum)  # Nesterov
            rows, columns = group[0].shape[-2:]
            update = orthogonalize(torch.cat([g.reshape(-1, rows, columns) for g in ahead]))
            update = update * (0.2 * max(rows, columns) ** 0.5)
            counts = [p.numel() // (rows * columns) for p in group]
            parts = [
                u.view_as(p).to(p.dtype) for u, p in zip(update.split(counts), group, strict=True)
            ]
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, parts, alpha=-rate)


def orthogonalize(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of x [N, rows, columns], roughly, in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.bfloat16()
    if x.shape[-2] > x.shape[-1]:
        wide = wide.mT
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.mT if x.shape[-2] > x.shape[-1] else wide


class Optimizer:
    """Matrices inside the layers go to Muon, embeddings, head, router and norms to AdamW."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, decay: float = 0.1):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        outer = ("embed_tokens", "lm_head", "gate.weight")
        matrices = [
            p for n, p in named if p.ndim >= 2 and not n.startswith(outer) and not n.endswith(outer)
        ]
        taken = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in taken]
        self.muon = Muon(matrices, muon_rate, decay)
        self.adam = torch.optim.AdamW(
            others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
        )
        self.adam_rate = adam_rate
        self.parameters = matrices + others

    def step(self, factor: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        self.muon.step(factor)
        self.adam.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None


def schedule(
    seconds: float, warm_steps: int, cooldown: float
) -> Iterator[tuple[int, float, float]]:
    """(step, fraction of the time used, factor of the learning rate).

    The factor warms up, stays, and falls in a straight line to zero. The clock starts at the
    second step, once compilation is done.
    """
    yield 0, 0.0, 1 / warm_steps
    start, step = time.monotonic(), 1
    while (used := (time.monotonic() - start) / seconds) < 1:
        yield step, used, min((step + 1) / warm_steps, (1 - used) / cooldown, 1.0)
        step += 1
