"""`python -m bench.packages WHO MODULE...`: one line and status 1 if some are not installed.

Scripts ask before they start anything, so this needs nothing but the standard library.
"""

import sys
from collections.abc import Iterable
from importlib.util import find_spec

INSTALL = 'pip install -e ".[bench]"'


def missing(modules: Iterable[str]) -> list[str]:
    """The packages, as pip names them, whose modules are not there."""
    absent = (name for name in modules if find_spec(name) is None)
    return ["cupy-cuda13x" if name == "cupy" else name.replace("_", "-") for name in absent]


def main(who: str, *modules: str) -> None:
    absent = missing(modules)
    if absent:
        sys.exit(f"{who}: not installed: {', '.join(absent)}; {INSTALL}")


if __name__ == "__main__":
    main(*sys.argv[1:])
