"""The embedded checkpoint in an implementation that shares no line with this project.

transformers' DeepseekV3 runs it in float32 on the CPU, with the INT4 experts that
compressed-tensors decompressed to bf16(q * scale). Needs the `oracle` extra; used by
`make_golden.py` and `pytest -m oracle` alone.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "numpy")


class Oracle:
    """Float32 logits of plain sequences and of trees; greedy continuations with their margins."""

    def __init__(self, folder: Path):
        torch.set_num_threads(1)  # sums do not depend on the number of cores
        text = json.loads((folder / "config.json").read_text())["text_config"]
        config = DeepseekV3Config.from_dict(text | {"model_type": "deepseek_v3"})
        self.model = DeepseekV3ForCausalLM.from_pretrained(
            folder,
            config=config,
            key_mapping={r"^language_model\.": ""},
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        for weight in self.model.parameters():
            weight.data = (
                weight.data.float()
            )  # experts arrive as bfloat16 whatever dtype is asked for

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32[T, V]: row t scores the token after ids[: t + 1]."""
        return self._forward(ids)

    def greedy(self, ids: list[int], steps: int) -> tuple[list[int], list[float]]:
        """The most probable continuation, and how far each token's logit leads the next best."""
        cache = DynamicCache(config=self.model.config)
        tokens, gaps, new = [], [], ids
        for _ in range(steps):
            row = self._forward(new, last=1, cache=cache)[0]
            second, first = np.partition(row, -2)[-2:]
            new = [int(row.argmax())]
            tokens += new
            gaps.append(float(first - second))
        return tokens, gaps

    def tree_logits(self, prompt: list[int], tokens: list[int], parents: list[int]) -> np.ndarray:
        """float32[N, V] of a tree rooted in the last prompt token, which is node 0.

        `tokens` and `parents` describe nodes 1 .. N-1. A node sees the prompt, its ancestors and
        itself, and its position is that of a token as deep in a plain sequence. The mask is
        additive: eager attention takes a boolean one without complaint and adds it as 0 and 1.
        """
        rows = len(prompt) + len(tokens)
        root = len(prompt) - 1
        hidden = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)
        positions = list(range(len(prompt)))
        for row, parent in enumerate(parents, start=len(prompt)):
            hidden[row] = hidden[root + parent]
            hidden[row, row] = 0.0
            positions.append(positions[root + parent] + 1)
        return self._forward([*prompt, *tokens], positions, hidden, last=len(tokens) + 1)

    @torch.inference_mode()
    def _forward(self, ids, positions=None, mask=None, last=0, cache=None) -> np.ndarray:
        output = self.model(
            input_ids=torch.tensor([ids]),
            position_ids=None if positions is None else torch.tensor([positions]),
            attention_mask=None if mask is None else mask[None, None],
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=last,  # 0 keeps all
        )
        return output.logits[0].numpy()


def versions() -> dict[str, str]:
    """What produced the numbers, for the provenance record."""
    return {name: version(name) for name in PACKAGES}
