"""What a `Sharded` does that stands on the floors above it, given to it in one place."""

from __future__ import annotations

from fspmd.autodiff.engine import backward, gradients, on_gradient
from fspmd.autodiff.transforms import dual, parts
from fspmd.placement.pictures import html, is_number, text
from fspmd.sharded import provide


class _Above:
    backward = staticmethod(backward)
    gradients = staticmethod(gradients)
    on_gradient = staticmethod(on_gradient)
    dual = staticmethod(dual)
    parts = staticmethod(parts)
    text = staticmethod(text)
    html = staticmethod(html)
    is_number = staticmethod(is_number)


def install() -> None:
    """From here on."""
    provide(_Above())
