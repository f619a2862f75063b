"""Step times of a GPU, kept from run to run beside the compiled kernels, by machine and model.

A file that is absent or damaged, or a folder that cannot be written, costs a measurement each run.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from ddtree_numba.budget import StepTimes

KERNELS = Path(__file__).parent / "kernels"


def place(*what: object) -> Path:
    """The file for a machine and a model, as their text tells them apart, and these kernels."""
    from ddtree_numba.kernels.cache import folder

    found = hashlib.blake2b("\n".join(map(repr, what)).encode(), digest_size=16)
    for source in sorted(KERNELS.glob("*.py")):
        found.update(source.read_bytes())
    return folder() / f"steps-{found.hexdigest()}.json"


def load(path: Path) -> StepTimes | None:
    """What was measured; None if nothing was that can be read."""
    try:
        fields = json.loads(path.read_text())
        times = StepTimes(
            float(fields["draft"]),
            tuple(map(int, fields["widths"])),
            tuple(map(float, fields["verify"])),
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    rising = all(a < b for a, b in pairwise((0, *times.widths)))
    whole = rising and len(times.widths) == len(times.verify) > 1
    return times if whole and all(map(possible, (times.draft, *times.verify))) else None


def possible(seconds: float) -> bool:
    """Of a step."""
    return 0 < seconds < math.inf


def store(path: Path, times: StepTimes) -> None:
    """Whole or not at all."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(json.dumps(asdict(times)) + "\n")
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
