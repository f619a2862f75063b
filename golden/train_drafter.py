"""Train the DFlash drafter on the quantised target's hidden states and continuations."""

import time
from collections import deque
from collections.abc import Callable

import torch
from continuations import LONG, SHORT, Sequences, make
from muon import Optimizer, schedule
from shapes import DRAFT_SHAPE
from torch import Tensor
from torch.nn import functional as F
from torch_drafter import Drafter
from torch_target import Target

CHUNKS = 8  # batches of continuations, made while training goes on; every fourth is long
BATCH, NEW_TOKENS = 8192, 192  # of a short batch; a long one has a quarter of the rows
KEPT = 4  # latest batches that training draws from
POSITIONS = 96 * 1024  # of a step: as many rows as fit
ANCHORS = 32  # of a row
DECAY = 4.0  # the loss of depth i weighs exp(-(i - 1) / DECAY)
MUON_RATE, ADAM_RATE = 4e-3, 2e-3
WARM_STEPS, COOLDOWN = 100, 0.7
SEED = 2

Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def train(
    target: Target,
    data: dict[str, Tensor],
    seconds: float,
    device: str,
    batch: int = BATCH,
    new_tokens: int = NEW_TOKENS,
) -> tuple[Drafter, dict]:
    """`target` is the stored one; `seconds` include the continuations."""
    torch.manual_seed(SEED)
    drafter = Drafter(DRAFT_SHAPE).to(device)
    losses = _prepare(drafter, target, device)
    optimizer = Optimizer(drafter, MUON_RATE, ADAM_RATE)
    pool: deque[tuple[Sequences, Tensor]] = deque(maxlen=KEPT)
    curve, made, new, making, anchors, started = [], 0, 0, 0.0, 0, time.monotonic()
    recent: deque[Tensor] = deque(maxlen=100)
    for step, used, factor in schedule(seconds, WARM_STEPS, COOLDOWN):
        if made < CHUNKS and used >= made / (CHUNKS + 2):
            before = time.monotonic()
            longest, count = (LONG, batch // 4) if made % 4 == 3 else (SHORT, batch)
            pool.append(make(target, data, longest, count, new_tokens, device))
            new += int((pool[-1][0].lengths - pool[-1][0].prompts).sum())
            made, making = made + 1, making + time.monotonic() - before
        sequences, features = pool[int(torch.randint(len(pool), (1,)))]
        width = sequences.ids.shape[1]
        rows = torch.randint(len(features), (max(POSITIONS // width, 1),), device=device)
        drawn = Sequences(*(x[rows] for x in sequences))
        loss, hits = _loss(drafter, target, drawn, features[rows], losses, device)
        loss.backward()
        optimizer.step(factor)
        anchors += len(rows) * ANCHORS
        recent.append(hits)
        if used >= len(curve) / 8:
            curve.append({"step": step, "anchors": anchors, "train_loss": round(loss.item(), 4)})
            print(curve[-1], f"{making:.0f} s for continuations", flush=True)
    log = {
        "seconds": round(time.monotonic() - started, 1),
        "seconds_for_continuations": round(making, 1),
        "new_tokens": new,
        "steps": step + 1,
        "anchors": anchors,
        "curve": curve,
        "last_accuracy_by_depth": [round(x, 4) for x in torch.stack(list(recent)).mean(0).tolist()],
    }
    return drafter, log


def _prepare(drafter: Drafter, target: Target, device: str) -> Losses:
    def losses(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(states, target.lm_head.weight).float()
        each = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(
            wanted
        )
        return each, logits.detach().argmax(-1) == wanted

    if device == "cuda":
        losses = torch.compile(losses, dynamic=False)
        for layer in drafter.layers:
            layer.compile(dynamic=False)
    return losses


def _loss(
    drafter: Drafter,
    target: Target,
    sequences: Sequences,
    features: Tensor,
    losses: Losses,
    device: str,
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of random anchors, and the hit rate of every depth.

    An anchor is any position from the prompt's last token to the one before the sequence's last.
    """
    ids, prompts, lengths = sequences
    depths = torch.arange(1, drafter.shape.block_size, device=ids.device)
    drawn = torch.rand(len(ids), ANCHORS, device=ids.device) * (lengths - prompts).unsqueeze(-1)
    anchors = prompts.unsqueeze(-1) - 1 + drawn.long()
    at = anchors.unsqueeze(-1) + depths  # [B, A, L]
    inside = at < lengths.view(-1, 1, 1)
    wanted = ids.gather(1, at.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(at)
    with torch.autocast(device, torch.bfloat16):
        states = drafter(ids, features, anchors, target.embed_tokens.weight)
        each, hit = losses(states, wanted)
    weight = torch.exp(-(depths - 1) / DECAY) * inside
    hits = (hit & inside).sum((0, 1)) / inside.sum((0, 1)).clamp_min(1)
    return (each * weight).sum() / weight.sum(), hits
