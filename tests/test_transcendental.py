"""The functions of a softmax as plain Python, within the errors that they promise, to the ends of ranges."""

import numpy as np
import pytest

from kvcache_dpex.kernels import transcendental
from kvcache_dpex.kernels.softmax import max_f32


def error_of(function, exact, x):
    """The largest error in units in the last place of the exact result, and the results."""
    with np.errstate(all="ignore"):
        found = np.array([function(each) for each in x])
        wanted = exact(x.astype("f8"))
        return np.max(np.abs(found - wanted) / np.spacing(np.abs(wanted).astype("f4"))), found


def test_exp2():
    x = np.concatenate([np.linspace(-126, 127, 997), np.linspace(-1, 1, 501)]).astype("f4")
    error, _ = error_of(transcendental.exp2, np.exp2, x)
    assert error <= 1


@pytest.mark.parametrize("x", [-126.001, -127, -140, -149, -152.5, -200, -1e4, -3e38, -np.inf])
def test_exp2_of_less_than_its_range_is_zero(x):
    """Weights of scores far below the largest."""
    with np.errstate(all="ignore"):
        assert transcendental.exp2(np.float32(x)) == 0


def test_exp2_of_nan():
    with np.errstate(all="ignore"):
        assert np.isnan(transcendental.exp2(np.float32("nan")))


def test_log2():
    rng = np.random.default_rng(5)
    x = np.concatenate([np.exp2(rng.uniform(-126, 127, 800)), rng.uniform(0.5, 2, 400)]).astype("f4")
    with np.errstate(all="ignore"):
        found = np.array([transcendental.log2(each) for each in x])
    wanted = np.log2(x.astype("f8"))
    assert (abs(found - wanted) <= np.maximum(2e-7, 2 * np.spacing(np.abs(wanted).astype("f4")))).all()


def test_tanh():
    x = np.concatenate([np.linspace(-25, 25, 1001), np.linspace(-1, 1, 1001), [1e-6, 1e4, -1e30]]).astype(
        "f4"
    )
    error, found = error_of(transcendental.tanh, np.tanh, x[x != 0])
    assert error <= 4
    assert (abs(found) <= 1).all()


@pytest.mark.parametrize(
    ("a", "b", "larger"), [(1, 2, 2), (2, 1, 2), (1, np.nan, 1), (-np.inf, np.nan, -np.inf)]
)
def test_the_larger_of_two_where_one_may_be_nan(a, b, larger):
    """A score that is NaN must not become the largest one."""
    assert max_f32(np.float32(a), np.float32(b)) == larger
