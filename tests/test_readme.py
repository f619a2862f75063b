"""The README's figures are those of bench/results."""

import pytest

pytest.importorskip("numba.cuda")

from bench import readme


def test_figures_are_the_measured_ones():
    text = readme.README.read_text()
    assert readme.filled(text) == text, "run: python -m bench.readme"


def test_another_figure_would_show():
    text = readme.README.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| ddtree | 16 |"))
    assert readme.filled(text.replace(row, row.replace("%", "0 %"))) == text
    with pytest.raises(ValueError, match="budgets: begin"):
        readme.filled(text.replace("<!-- budgets: begin -->", ""))
