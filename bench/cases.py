"""What a bench measures: `@pytest.mark.parametrize("case", cases(spec))`.

Published sizes carry the marker `gpu`; one small case does not, and runs once on the CPU executor
wherever benches are collected without a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ddtree_numba.spec.numerics import Cost

ROWS = (1, 9, 17, 33, 65, 4096)  # decode, trees of 8 to 64 nodes, prefill
PUBLISHED = "k26"  # how specifications name their cases of published size


@dataclass(frozen=True)
class Case:
    """One size of one operation. `spec` is its specification, or anything with the same names."""

    spec: Any
    name: str
    dims: dict
    on_gpu: bool

    @property
    def op(self) -> str:
        return self.spec.__name__.rpartition(".")[2]

    @property
    def cost(self) -> Cost:
        return self.spec.cost(self.dims)

    def inputs(self, rng: np.random.Generator) -> dict:
        return self.spec.inputs(self.dims, rng)

    def expected(self, given: dict) -> Any:
        return getattr(self.spec, self.op)(**given)


def cases(
    spec: Any,
    sizes: dict[str, dict] | None = None,
    *,
    rows: Sequence[int] = ROWS,
    axis: str = "T",
    smoke: str | None = None,
) -> list:
    """Every published case of the specification with every number of rows, and a smoke case.

    sizes: other cases to measure, name -> dims. axis: the dimension that counts rows; a case
    without it is taken as it is. smoke: name of the small case, by default the first.
    """
    if sizes is None:
        published = {k: v for k, v in spec.CASES.items() if k.startswith(PUBLISHED)}
        sizes = {
            name if n is None else f"{name}-{axis}{n}": dims if n is None else dims | {axis: n}
            for name, dims in published.items()
            for n in (rows if axis in dims else [None])
        }
    smoke = smoke or next(name for name in spec.CASES if not name.startswith(PUBLISHED))
    small = Case(spec, smoke, spec.CASES[smoke], on_gpu=False)
    measured = [Case(spec, name, dims, on_gpu=True) for name, dims in sizes.items()]
    return [pytest.param(small, id=f"smoke-{smoke}")] + [
        pytest.param(case, id=case.name, marks=pytest.mark.gpu) for case in measured
    ]
