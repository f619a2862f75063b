"""Where a rank that is a process stands.

torchrun and other launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every
process, on every host; `ddtree_numba.processes` does for those that it starts itself.
"""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

BOOT = "/proc/sys/kernel/random/boot_id"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOBS = ("DDTREE_NUMBA_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
SECONDS = "DDTREE_NUMBA_RANK_SECONDS"
CHECK = "DDTREE_NUMBA_CHECK_RANKS"
SHARED_GPUS = "DDTREE_NUMBA_SHARED_GPUS"
MEETING = "DDTREE_NUMBA_MEETING"
WAYS = ("device", "host", "nccl")
PARENT = "DDTREE_NUMBA_PARENT"
LISTENER, NEWS = "DDTREE_NUMBA_LISTENER", "DDTREE_NUMBA_NEWS"


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and where rank 0 is found.

    `seconds` is how long a rank waits for another. A rank that this package started has a `parent`
    (its process id); rank 0 then inherits `listener`, a bound socket, and `news`, a pipe on which
    the parent tells of ranks that ended.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    job: str = ""
    seconds: float = 60.0
    parent: int | None = None
    listener: int | None = None
    news: int | None = None

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def from_environment(environ: Mapping[str, str] = os.environ) -> Place | None:
    """This rank's place; None where no launcher started it. ValueError names what is wrong."""
    given = [name for name in VARIABLES[:2] if environ.get(name)]
    if not given:
        return None
    for name in VARIABLES:
        if not environ.get(name):
            raise ValueError(f"{given[0]} is set, so {name} must be too")
    world = _number(environ, "WORLD_SIZE", 1, 1024)
    rank = _number(environ, "RANK", 0, world - 1)
    return Place(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", 0, rank),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 1, 65535),
        job=next((environ[name] for name in JOBS if environ.get(name)), ""),
        seconds=patience(environ),
        parent=_number(environ, PARENT, 1, 2**31 - 1) if environ.get(PARENT) else None,
        listener=_inherited(environ, LISTENER, stat.S_ISSOCK),
        news=_inherited(environ, NEWS, stat.S_ISFIFO),
    )


def patience(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that a rank waits for another."""
    text = environ.get(SECONDS) or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"{SECONDS} must be a number above 0, not {text!r}")
    return seconds


def check_every(environ: Mapping[str, str] = os.environ) -> int:
    """Rounds from one comparison of the ranks to the next; 0: none."""
    text = environ.get(CHECK) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{CHECK} must be a number of rounds, not {text!r}")
    return int(text)


def machine() -> str:
    """This machine's boot: the same in all of its containers."""
    return Path(BOOT).read_text().strip()


def meeting_way(environ: Mapping[str, str] = os.environ) -> str:
    """Where ranks with GPUs meet: memory of the GPUs, of the host, or NCCL; "": what works."""
    way = environ.get(MEETING, "")
    if way and way not in WAYS:
        raise ValueError(f"{MEETING} must be one of {', '.join(WAYS)}, not {way!r}")
    return way


def gpus_are_shared(environ: Mapping[str, str] = os.environ) -> bool:
    """May ranks share GPUs, where there are too few? Their kernels then take turns: for tests."""
    return environ.get(SHARED_GPUS, "") not in ("", "0")


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise ValueError(f"{name} must be {least} .. {most}, not {text!r}")
    return int(text)


def _inherited(environ: Mapping[str, str], name: str, fits: Callable[[int], bool]) -> int | None:
    """A descriptor that the parent has opened."""
    if not environ.get(name):
        return None
    number = _number(environ, name, 0, 2**31 - 1)
    try:
        if fits(os.fstat(number).st_mode):
            return number
    except OSError:
        pass
    raise ValueError(f"{name} {number} is not what a parent opened: unset it")
