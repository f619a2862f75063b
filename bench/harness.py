"""One bench: check the kernel against its specification, then time it.

`measure(case, kernel)` in a bench file arrives here; README.md beside this says what it takes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import Case
from bench.timing import ROUNDS, Clock, arrays, launches, mapped, plan
from ddtree_numba.spec.numerics import BF16, widen

SEED = 20260612
WARMUP = 3  # rounds


@dataclasses.dataclass
class Call:
    """A kernel with one copy of its arguments on the device."""

    kernel: Callable
    given: dict
    out: Any
    updates: tuple[str, ...]

    def __call__(self, stream: Any) -> None:
        out = {} if self.updates else dict(out=self.out)
        self.kernel(**self.given, **out, stream=stream)

    @property
    def result(self) -> Any:
        return tuple(self.given[name] for name in self.updates) if self.updates else self.out


class Placed:
    """Host arrays on the device; an array that was placed before keeps its place."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.known: dict[int, tuple[np.ndarray, Any]] = {}  # the array keeps its id from reuse

    def __call__(self, array: np.ndarray) -> Any:
        if id(array) not in self.known:
            self.known[id(array)] = array, self.device.array(array)
        return self.known[id(array)][1]


def measure(
    case: Case,
    kernel: Callable,
    *,
    device: Any,
    benchmark: Any,
    clock: Clock,
    updates: tuple[str, ...] = (),
    vary: Callable[[dict, np.random.Generator], dict] | None = None,
    more: Callable[[dict], dict] | None = None,
) -> dict | None:
    """What was measured, still without the roofs; None for a run that only checked."""
    rng = np.random.default_rng(SEED)
    given = case.inputs(rng)
    if vary:
        given = vary(given, rng)
    expected = _expected(case, given, updates)
    placed = Placed(device)
    arguments = mapped(placed, given | (more(given) if more else {}))
    out = None if updates else mapped(device.poisoned, expected)
    first = Call(kernel, arguments, out, updates)
    with launches() as launched:
        device.run(first)
    require_equal(expected, mapped(device.host, first.result), case.spec.TOLERANCE)
    if not case.on_gpu:
        benchmark.pedantic(lambda: None)  # it is checked; the executor's time means nothing
        return None

    own = {id(array): array.nbytes for array in arrays((arguments, out))}
    footprint = sum(own.values())
    planned = plan(case.cost.bytes, footprint, device.l2_bytes)
    calls = [first]
    while len(calls) < planned.copies:
        new = mapped(placed, vary(given, rng)) if vary else mapped(device.copy, arguments)
        calls.append(Call(kernel, arguments | new, mapped(device.copy, out), updates))

    def sequence(stream: Any) -> None:
        for i in range(planned.launches):
            calls[i % len(calls)](stream)

    replay = device.capture(sequence)

    def one_round() -> None:
        clock.seconds += device.seconds(replay) / planned.launches

    if benchmark.enabled:
        device.warm(replay)
    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=WARMUP)
    if not benchmark.enabled:
        return None
    stats = benchmark.stats.stats
    return dict(
        op=case.op,
        case=case.name,
        time_us=stats.median * 1e6,
        q1_us=stats.q1 * 1e6,
        q3_us=stats.q3 * 1e6,
        rounds=stats.rounds,
        launches=planned.launches,
        copies=planned.copies,
        bytes=case.cost.bytes,
        flops=case.cost.flops,
        kernels=[_used(kernel, grid, device.arch) for kernel, grid, _ in launched],
    )


def against(row: dict, roofs: dict) -> dict:
    """The row with its rates and its share of the roof: the larger of both floors over the time."""
    seconds = row["time_us"] / 1e6
    memory = row["bytes"] / roofs["copy"]
    compute = row["flops"] / roofs["mma"] if roofs["mma"] else 0.0
    floor = max(memory, compute)
    return row | dict(
        gb_per_s=row["bytes"] / seconds / 1e9,
        tflop_per_s=row["flops"] / seconds / 1e12,
        floor_us=floor * 1e6,
        bound="memory" if memory >= compute else "compute",
        share=floor / seconds,
    )


def require_equal(expected: Any, got: Any, tolerance: int | dict) -> None:
    """Array for array: the same bytes (tolerance 0), or as numpy's assert_allclose."""
    for n, (wanted, found) in enumerate(zip(arrays(expected), arrays(got), strict=True)):
        assert (wanted.shape, wanted.dtype) == (found.shape, found.dtype), f"result {n}"
        if tolerance:
            wide = [widen(a) if a.dtype == BF16 else a for a in (found, wanted)]
            np.testing.assert_allclose(*wide, **tolerance, err_msg=f"result {n}")
        elif wanted.tobytes() != found.tobytes():
            wrong = np.argwhere(wanted != found)
            where = f"first at {wrong[0].tolist()}" if len(wrong) else "in the sign of a zero"
            raise AssertionError(f"result {n}: {len(wrong)} of {wanted.size} differ, {where}")


def _expected(case: Case, given: dict, updates: tuple[str, ...]) -> Any:
    if not updates:
        return case.expected(given)
    changed = given | {name: mapped(np.copy, given[name]) for name in updates}
    case.expected(changed)
    return tuple(changed[name] for name in updates)


def _used(kernel: Any, grid: int | tuple[int, ...], arch: str) -> dict:
    compiled = kernel.compile(arch)
    return dict(
        name=kernel.name,
        grid=list(grid) if isinstance(grid, tuple) else [grid],
        threads=kernel.threads,
        registers=compiled.registers,
        shared_bytes=compiled.shared_bytes + kernel.shared_bytes,
        spill_bytes=compiled.spill_bytes,
    )
