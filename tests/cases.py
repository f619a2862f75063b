"""Which cases of a specification run in tests."""


def small(cases: dict[str, dict]) -> list[str]:
    """Names of the cases below published size; those named k26 are for benches."""
    return [name for name in cases if not name.startswith("k26")]
