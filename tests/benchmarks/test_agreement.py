"""Agreement of outputs: common prefixes, and the first difference."""

import pytest

from benchmarks.agreement import Agreement, agreement, first_difference


def test_agreement_counts_the_common_prefix() -> None:
    found = agreement([[1, 2, 3, 4], [1, 2, 9, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert found == Agreement(num_identical=1, num_sequences=2, prefix_share=0.75)


def test_shorter_output_does_not_agree() -> None:
    assert agreement([[1, 2]], [[1, 2, 3, 4]]) == Agreement(0, 1, 0.5)


@pytest.mark.parametrize(
    ("outputs", "where"),
    [
        ([[1, 2], [3, 4]], None),
        ([[1, 2], [3, 5]], (1, 1)),
        ([[0, 2], [3, 5]], (0, 0)),
        ([[1, 2], [3]], (1, 1)),
        ([[1, 2], [3, 4, 5]], (1, 2)),
    ],
)
def test_first_difference(outputs: list[list[int]], where: tuple[int, int] | None) -> None:
    assert first_difference(outputs, [[1, 2], [3, 4]]) == where
