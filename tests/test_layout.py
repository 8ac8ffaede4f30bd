"""The layout algebra against brute force: every law is checked on all coordinates of small layouts."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fspmd.errors import FspmdError, ShapeError
from fspmd.meshes.layout import Layout, compose, concat, fit, row_major_strides

settings.register_profile("no deadline", deadline=None)  # machines under load are slow, not wrong
settings.load_profile("no deadline")

sizes = st.integers(1, 4)
modes = st.lists(st.tuples(sizes, st.integers(0, 13)), max_size=4)
layouts = modes.map(lambda pairs: Layout([n for n, _ in pairs], [d for _, d in pairs]))


@st.composite
def nested_layouts(draw: st.DrawFn) -> Layout:
    """Layouts as meshes have them: no offset twice, each stride past the reach of the smaller ones, in any order."""
    pairs, reach = [], 0
    for size in draw(st.lists(sizes, max_size=4)):
        stride = reach + draw(st.integers(1, 4))
        pairs.append((size, stride))
        reach += (size - 1) * stride
    pairs = draw(st.permutations(pairs))
    return Layout([n for n, _ in pairs], [d for _, d in pairs])


def by_coordinates(layout: Layout) -> list[int]:
    """The offsets in row-major order of coordinates, by the definition alone."""
    return [
        sum(i * stride for i, stride in zip(coordinate, layout.stride, strict=True))
        for coordinate in itertools.product(*map(range, layout.shape))
    ]


@given(layouts)
def test_offsets_index_and_coordinate_agree_with_the_definition(layout: Layout) -> None:
    expected = by_coordinates(layout)
    assert list(layout.offsets()) == expected
    assert list(layout.offsets(7)) == [7 + offset for offset in expected]
    assert [layout(i) for i in range(layout.size)] == expected
    assert [layout(c) for c in itertools.product(*map(range, layout.shape))] == expected
    assert layout.size == len(expected)
    assert layout.cosize == max(expected) + 1


@given(layouts)
def test_coalesce_keeps_the_function_in_the_fewest_modes(layout: Layout) -> None:
    fewest = layout.coalesce()
    assert by_coordinates(fewest) == by_coordinates(layout)
    assert fewest.coalesce() == fewest
    assert 1 not in fewest.shape
    for (_, slow), (size, fast) in itertools.pairwise(fewest.modes):
        assert slow != size * fast


@given(nested_layouts(), nested_layouts())
def test_coalesced_layouts_are_equal_exactly_when_their_functions_are(a: Layout, b: Layout) -> None:
    assert (a.coalesce() == b.coalesce()) == (by_coordinates(a) == by_coordinates(b))


@given(nested_layouts(), st.integers(-2, 60))
def test_coordinate_inverts_a_nested_layout(layout: Layout, offset: int) -> None:
    assert layout.is_nested
    found = [c for c in itertools.product(*map(range, layout.shape)) if layout(c) == offset]
    expected = found[0] if found else None
    assert layout.coordinate(offset) == expected


@given(layouts)
def test_is_nested_means_offsets_come_apart(layout: Layout) -> None:
    if layout.is_nested:
        assert len(set(by_coordinates(layout))) == layout.size
        for coordinate in itertools.product(*map(range, layout.shape)):
            assert layout.coordinate(layout(coordinate)) == coordinate


@given(layouts, st.data())
def test_window_is_a_run_of_indices(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.size - 1))
    size = data.draw(st.integers(1, layout.size - start))
    expected = by_coordinates(layout)[start : start + size]
    window = layout.window(start, size)
    if window is None:  # only where several modes meet inside of it
        assert len(layout.shape) > 1
    else:
        assert [window[0] + offset for offset in by_coordinates(window[1])] == expected


@given(st.lists(sizes, max_size=3), st.data())
def test_a_single_mode_has_every_window(shape: list[int], data: st.DataObject) -> None:
    layout = Layout(data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5)))
    start = data.draw(st.integers(0, layout.size - 1))
    assert layout.window(start, layout.size - start) is not None


@settings(max_examples=300)
@given(layouts, layouts)
def test_compose_is_composition_of_functions(outer: Layout, inner: Layout) -> None:
    try:
        both = compose(outer, inner)
    except ShapeError:
        return
    outer_offsets = by_coordinates(outer)
    assert by_coordinates(both) == [outer_offsets[index] for index in by_coordinates(inner)]


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_compose_always_succeeds_where_modes_are_only_regrouped(shape: list[int], data: st.DataObject) -> None:
    """What a mesh asks for: an outer layout of any strides, read by a dense layout whose borders contain its own."""
    outer = Layout(shape, [data.draw(st.integers(0, 50)) for _ in shape])
    finer = [part for size in shape for part in data.draw(st.sampled_from(_factorings(size)))]
    both = compose(outer, Layout(finer))
    assert by_coordinates(both) == by_coordinates(outer)


def _factorings(size: int) -> list[tuple[int, ...]]:
    return [(size,), *((n, size // n) for n in range(1, size + 1) if size % n == 0)]


@given(nested_layouts(), st.integers(-5, 5))
def test_fit_finds_the_layout_of_offsets(layout: Layout, start: int) -> None:
    assert fit(layout.offsets(start)) == (start, layout.coalesce())


@given(st.lists(st.integers(0, 12), max_size=8))
def test_fit_never_tells_other_offsets(offsets: list[int]) -> None:
    found = fit(offsets)
    if found is not None:
        assert [found[0] + offset for offset in by_coordinates(found[1])] == offsets


@pytest.mark.parametrize("offsets", [[], [0, 1, 3], [3, 2, 1], [0, 1, 2, 10, 11, 20], [0, 1, 10, 12]])
def test_fit_of_what_no_layout_tells_is_none(offsets: list[int]) -> None:
    assert fit(offsets) is None


@given(st.lists(layouts, max_size=3))
def test_concat_sums_one_offset_of_each(parts: list[Layout]) -> None:
    expected = [sum(each) for each in itertools.product(*map(by_coordinates, parts))]
    assert by_coordinates(concat(*parts)) == expected


def test_layouts_are_values() -> None:
    assert Layout((2, 4)) == Layout([2, 4], [4, 1])
    assert hash(Layout((2, 4))) == hash(Layout([2, 4], [4, 1]))
    assert Layout((2, 4)) != Layout((8,))
    assert Layout(5) == Layout((5,), (1,))
    assert repr(Layout((2, 4))) == "Layout((2, 4):(4, 1))"
    assert row_major_strides(()) == ()
    with pytest.raises(AttributeError):
        Layout(5).shape = (3,)  # type: ignore[misc]


def test_offsets_are_made_as_they_are_read() -> None:
    huge = Layout((10**12, 10**12))
    assert list(itertools.islice(huge.offsets(), 3)) == [0, 1, 2]
    assert huge.coordinate(10**13 + 5) == (10, 5)
    assert huge(10**23 + 5) == 10**23 + 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((2, 0)), "Layout((2, 0)): sizes must be integers >= 1"),
        (lambda: Layout((2, True)), "Layout((2, True)): sizes must be integers >= 1"),
        (lambda: Layout((2,), (-1,)), "Layout((2,), (-1,)): strides must be integers >= 0"),
        (lambda: Layout((2, 3), (1,)), "Layout((2, 3), (1,)): 2 sizes but 1 strides, give one each"),
        (lambda: Layout(4)(4), "Layout((4,):(1,)): index 4 is not in range(4)"),
        (lambda: Layout((2, 2))((1, 2)), "Layout((2, 2):(2, 1)): coordinate (1, 2) does not lie in the shape (2, 2)"),
        (lambda: Layout(4).window(3, 2), "Layout((4,):(1,)): indices 3 ... 4 are not all in range(4)"),
        (
            lambda: compose(Layout(4), Layout(3, 2)),
            "compose(Layout((4,):(1,)), Layout((3,):(2,))): the inner offsets reach 4, but outer takes indices below 4",
        ),
        (
            lambda: compose(Layout((2, 3), (10, 1)), Layout((3, 2))),
            "compose(Layout((2, 3):(10, 1)), Layout((3, 2):(2, 1))): "
            "no layout steps 3 times by 2 through Layout((2, 3):(10, 1))",
        ),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == message
    assert isinstance(caught.value, FspmdError)


def test_the_algebra_knows_no_torch() -> None:
    program = (
        "import sys, types\n"
        "package = types.ModuleType('fspmd'); package.__path__ = [sys.argv[1]]; sys.modules['fspmd'] = package\n"
        "import fspmd.meshes.layout\n"
        "assert 'torch' not in sys.modules"
    )
    import fspmd.meshes.layout

    folder = fspmd.meshes.layout.__file__.rsplit("/", 2)[0]
    subprocess.run([sys.executable, "-c", program, folder], check=True, timeout=300)
