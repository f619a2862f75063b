"""Train the target on files and chats; report held-out bits per byte."""

import math
import time
from collections.abc import Callable

import torch
from dataset import rows
from muon import Optimizer, schedule
from shapes import TARGET_SHAPE
from torch import Tensor
from torch.nn import functional as F
from torch_target import Moe, Target

ROWS, WIDTH = 128, 1024  # tokens of a step; every eighth step has half the rows, twice as long
CHAT_SHARE = 0.12
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 5e-3, 3e-3, 0.3
DROPOUT = 0.15
BIAS_RATE = 1e-3  # of the router's correction, towards equal load
WARM_STEPS, COOLDOWN = 100, 0.6
SEED = 1


def train(
    data: dict[str, Tensor], seconds: float, device: str, batch: int = ROWS
) -> tuple[Target, dict]:
    torch.manual_seed(SEED)
    model = Target(TARGET_SHAPE, DROPOUT).to(device)
    loss_of = _prepare(model, device)
    optimizer = Optimizer(model, MUON_RATE, ADAM_RATE, WEIGHT_DECAY)
    routers = [layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, Moe)]
    curve, seen, started, marks = [], 0, time.monotonic(), 0
    for step, used, factor in schedule(seconds, WARM_STEPS, COOLDOWN):
        wide = 2 if step % 8 == 7 else 1
        ids = _batch(data, batch // wide, WIDTH * wide + 1)
        model.train()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step(factor)
        for router in routers:
            load = router.load
            router.e_score_correction_bias += BIAS_RATE * factor * (load.mean() - load).sign()
        seen += batch * WIDTH
        if used >= marks / 12:
            marks += 1
            curve.append(_entry(step, seen, loss, model, data, device))
    curve.append(_entry(step, seen, loss, model, data, device))
    log = {
        "seconds": round(time.monotonic() - started, 1),
        "steps": step + 1,
        "tokens": seen,
        "unique_tokens": len(data["train"]) + len(data["train_chat"]),
        "curve": curve,
        "expert_load": [[round(x, 3) for x in router.load.tolist()] for router in routers],
    }
    stored = {"held_out_bits_per_byte": bits_per_byte(as_stored(model), data, device)}
    return model, log | stored


def as_stored(model: Target) -> Target:
    """A copy that computes with the numbers the files will hold."""
    copy = Target(TARGET_SHAPE).to(next(model.parameters()).device)
    copy.load_state_dict(model.state_dict())
    return copy.freeze_as_stored()


def _prepare(model: Target, device: str) -> Callable[[Tensor], Tensor]:
    def head(x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(model.norm(x), model.lm_head.weight).float()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    if device == "cuda":
        head = torch.compile(head, dynamic=False)
        for layer in model.layers:
            layer.compile(dynamic=False)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return head(model(ids[:, :-1]), ids[:, 1:])

    return loss_of


def _batch(data: dict[str, Tensor], count: int, width: int) -> Tensor:
    """Files from anywhere; chats from the start of a conversation."""
    chats = round(count * CHAT_SHARE)
    files, starts = data["train"], data["train_chat_starts"]
    at = torch.randint(len(files), (count - chats,), device=files.device)
    chosen = starts[torch.randint(len(starts), (chats,), device=files.device)]
    return torch.cat((rows(files, at, width), rows(data["train_chat"], chosen, width)))


def _entry(
    step: int, seen: int, loss: Tensor, model: Target, data: dict[str, Tensor], device: str
) -> dict:
    entry = {
        "step": step,
        "tokens": seen,
        "train_loss": round(loss.item(), 4),
        "held_out_bits_per_byte": bits_per_byte(as_stored(model), data, device),
    }
    print(entry, flush=True)
    return entry


@torch.no_grad()
def bits_per_byte(model: Target, data: dict[str, Tensor], device: str, width: int = WIDTH) -> float:
    """Over the held-out files, cut into pieces of `width` tokens that are scored apart."""
    stream, total = data["held_out"], 0.0
    whole = (len(stream) - 1) // width * width
    pieces = stream[:whole].view(-1, width), stream[1 : whole + 1].view(-1, width)
    for ids, targets in zip(*(p.split(64) for p in pieces), strict=True):
        with torch.autocast(device, torch.bfloat16):
            logits = model.logits(model(ids))
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    share = whole / len(stream)
    return round(total / math.log(2) / (float(data["held_out_bytes"]) * share), 4)
