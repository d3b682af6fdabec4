"""Curves of two runs that are the same to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_equal_to_the_bit(found: Any) -> None:
    for mine, its in zip(*found, strict=True):
        assert (mine.loss, mine.grad_norm) == (its.loss, its.grad_norm)
        assert mine.gradients.keys() == its.gradients.keys()
        for name, gradient in mine.gradients.items():
            assert np.array_equal(gradient, its.gradients[name]), name
