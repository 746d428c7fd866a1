"""The timing model by hand."""

import pytest

from echo_jax.echo.instrument import rates


def test_the_model_by_hand():
    """t_up 6, t_down 1: the setting of the paper's wall-clock study, R = 6."""
    assert rates.ratio(6.0, 1.0) == 6
    assert [rates.seconds_per_update(6.0, 1.0, e) for e in (1, 2, 3, 6, 8)] == [
        6,
        3,
        2,
        1,
        1,
    ]
    assert [rates.seconds_per_fresh(6.0, 1.0, e) for e in (1, 6, 8)] == [6, 6, 8]
    assert rates.idle_fraction(2.0, 1.0) == 0.5
    assert rates.idle_fraction(2.0, 1.0, 2) == 0
    assert rates.idle_fraction(0.5, 1.0) == 0


def test_the_advice_is_the_ratio_within_one_and_the_cap():
    assert [rates.advised_factor(r) for r in (0.3, 1.0, 3.7, 8.0)] == [1, 1, 3.7, 4]
    assert rates.advised_factor(8.0, cap=16) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rates.ratio(1.0, 0.0), "t_down_s=0.0 must be positive"),
        (lambda: rates.seconds_per_update(float("nan"), 1.0, 2), "t_up_s=nan"),
        (lambda: rates.seconds_per_fresh(1.0, 1.0, 0.5), "factor=0.5"),
        (lambda: rates.advised_factor(2.0, cap=0.5), "cap=0.5"),
        (lambda: rates.advised_factor(-1.0), "ratio=-1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
