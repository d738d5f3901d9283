"""The tolerance rule, and the laws of normalization as checks to run on a layer of your own.

Not a test framework: every check raises AssertionError with one sentence, and any runner will do. Checks
work on copies: the layer's parameters, statistics and mode stay as they are.

**The rule.** A result may miss the float64 answer by what plain code of the same dtype misses, plus a few
ulps. One ulp is eps(dtype) times a scale: what the result was computed *from*, since a difference of large
numbers cannot be as exact as its own small value suggests.
"""

from normalcy.testing.laws import (
    check_batch_order,
    check_constant_gives_bias,
    check_depends_on_neighbours,
    check_eval_independent_of_neighbours,
    check_gradient_sums_to_zero,
    check_gradients,
    check_layouts,
    check_scale_invariance,
    check_shift_invariance,
    check_train_equals_eval,
    layouts,
)
from normalcy.testing.tolerance import ULPS, assert_close, assert_no_worse_than_plain, errors_in_ulps

__all__ = [
    "ULPS",
    "assert_close",
    "assert_no_worse_than_plain",
    "check_batch_order",
    "check_constant_gives_bias",
    "check_depends_on_neighbours",
    "check_eval_independent_of_neighbours",
    "check_gradient_sums_to_zero",
    "check_gradients",
    "check_layouts",
    "check_scale_invariance",
    "check_shift_invariance",
    "check_train_equals_eval",
    "errors_in_ulps",
    "layouts",
]
