"""Gives `Sharded` its functions that live on upper floors."""

from __future__ import annotations

from fspmd.autodiff.custom_functions import apply_function
from fspmd.autodiff.engine import backward, gradients, on_gradient
from fspmd.autodiff.transforms import dual, parts
from fspmd.placement.pictures import html, is_number, text
from fspmd.sharded import provide


class _Functions:
    backward = staticmethod(backward)
    gradients = staticmethod(gradients)
    apply_function = staticmethod(apply_function)
    on_gradient = staticmethod(on_gradient)
    dual = staticmethod(dual)
    parts = staticmethod(parts)
    text = staticmethod(text)
    html = staticmethod(html)
    is_number = staticmethod(is_number)


def install() -> None:
    """Give `Sharded` the functions."""
    provide(_Functions())
