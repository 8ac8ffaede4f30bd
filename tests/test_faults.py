"""One of four processes does another thing than the rest: all are told within seconds which one, and at which line."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import fault_programs
import pytest
import torch
from processes import Processes, free_port

from fspmd import (
    ArgumentError,
    P,
    PeerError,
    Sharded,
    communication_log,
    deadline,
    debug,
    device_get,
    device_put,
    jit,
    make_mesh,
    reshard,
)
from fspmd.global_view.dispatch import dispatch
from fspmd.inspection import deadlines, long_waits
from fspmd.inspection.histories import parting_text
from fspmd.inspection.sites import CallSites, arguments, kept_rows, numbers_of, parted, site_text
from fspmd.transport import pending, reports
from fspmd.transport.known_values import ArgumentRow
from fspmd.user_code import line_of

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Faults are told within seconds of four processes on two cores, and not of eight."""
    with (tmp_path_factory.getbasetemp().parent / "faults").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _line(text: str) -> int:
    """The number of the line of the programs that ends with a text."""
    lines = Path(fault_programs.__file__).read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(text)]
    return found


def _run(four: Processes, program: Callable[[int], Any], within: float) -> list[str]:
    found = four.run(program, free_port())
    assert max(seconds for _, seconds in found) < within
    return [error for error, _ in found]


SUM = "psum over 'x' of mesh(x=4), f64[2] (fault_programs.py:"
PARTED = [
    (fault_programs.another_kind, 6, 1, "psum (max) over 'x' of mesh(x=4), f64[2]", SUM),
    (fault_programs.one_more, 3, 1, f"{SUM}{_line('  # alone')})", SUM),
    (fault_programs.another_shape, 8, 3, "psum over 'x' of mesh(x=4), f64[6]", SUM.replace("[2]", "[4]")),
    (fault_programs.another_dtype, 8, 3, "psum over 'x' of mesh(x=4), i64[2]", SUM),
    (fault_programs.another_shape_in_a_record, 6, 0, "x' of mesh(x=4), f64[2]", "x' of mesh(x=4), f64[4]"),
    (fault_programs.not_recorded, 1, 1, "f64[2] (fault_programs.py:", "f64[2], in a record (fault_programs.py:"),
    (fault_programs.in_a_record, 10, 2, "ragged_all_to_all over 'x'", SUM),
]


@pytest.mark.parametrize(("program", "number", "rank", "mine", "others"), PARTED)
def test_another_collective_is_told_on_all_ranks(
    four: Processes, program: Callable[[int], Any], number: int, rank: int, mine: str, others: str
) -> None:
    first, *rest = _run(four, program, within=10)
    assert rest == [first] * 3
    head, *lines, advice = first.splitlines()
    assert head.startswith(f"LockstepError: ranks ran different collectives, from collective number {number} of their ")
    assert advice.startswith("all ranks must make the same calls in the same order")
    assert len(lines) == 4
    for i, line in enumerate(lines):
        assert line.startswith(f"  * rank {i}: ")
        assert (mine if i == rank else others) in line, line
    assert lines[rank].partition(": ")[2] not in first.replace(lines[rank], "")


@pytest.mark.parametrize("kind", ["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"])
@pytest.mark.parametrize("wrong", [4, 80])
def test_another_size_is_told_before_anything_is_sent(four: Processes, kind: str, wrong: int) -> None:
    program = partial(fault_programs.another_size, kind=kind, wrong=wrong)
    first, *rest = _run(four, program, within=5)
    assert rest == [first] * 3
    assert first.startswith("LockstepError: ranks ran different collectives, from collective number 12 of their group")
    for rank, line in enumerate(first.splitlines()[1:-1]):
        assert line.startswith(f"  * rank {rank}: ")
        assert f"f64[{wrong if rank == 1 else 8}, " in line, line


def test_ranks_that_differ_do_not_wait_for_one_that_comes_late(four: Processes) -> None:
    found = four.run(fault_programs.one_comes_late, free_port())
    assert {error for error, _ in found} == {found[0][0]}
    assert max(seconds for i, (_, seconds) in enumerate(found) if i != 2) < 3.5
    lines = found[0][0].splitlines()[1:5]
    words = ["psum over", "psum (max) over", "has told of no collective of this group", "psum over"]
    for rank, (line, word) in enumerate(zip(lines, words, strict=True)):
        assert line.startswith(f"  * rank {rank}: {word}")


def test_steps_on_new_data_wait_for_nobody(four: Processes) -> None:
    first, *rest = _run(four, fault_programs.meetings, within=1)
    assert rest == [first] * 3
    assert re.fullmatch(r"\[1(, [01]){3}(, 0){4}\]", first)


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize(
    ("what", "mine", "others"),
    [
        ("op", " (max) over", "psum_varying over"),
        ("dim", " (dim 1) over", "all_gather over"),
        ("to dim", "all_to_all (dim 1) over", "all_to_all (to dim 1) over"),
        ("root", " (root 3) over", "broadcast over"),
    ],
)
def test_another_option_is_told(
    four: Processes, what: str, mine: str, others: str, is_jitted: bool, is_locked: bool
) -> None:
    program = partial(fault_programs.another_option, what=what, is_jitted=is_jitted, is_locked=is_locked)
    first, *rest = _run(four, program, within=20)
    assert rest == [first] * 3
    for rank, line in enumerate(first.splitlines()[1:5]):
        assert line.startswith(f"  * rank {rank}: ")
        assert (mine if rank == 2 else others) in line, line


@pytest.mark.parametrize(
    ("program", "rank", "mine", "others"),
    [
        (fault_programs.another_record, 1, "psum (max) over 'x' of mesh(x=4), f64[1] (", "psum_unreduced over 'x' of "),
        (fault_programs.swapped, 3, f"{SUM}{_line('  # swapped')})", SUM),
    ],
)
def test_another_record_is_told_before_it_runs(
    four: Processes, program: Callable[[int], Any], rank: int, mine: str, others: str
) -> None:
    """Nothing watches: ranks compare the collectives of each new record."""
    first, *rest = _run(four, program, within=10)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    assert head == (
        "LockstepError: ranks have recorded different collectives, from collective number 1 of their group in the "
        "record on:"
    )
    for i, line in enumerate(lines):
        assert line.startswith(f"  * rank {i}: {mine if i == rank else others}"), line
        assert i == rank or mine not in line


@pytest.mark.parametrize("where", ["check_replicas", "barrier", "save", "a new record", "other axes"])
def test_replays_in_another_order_are_told_where_ranks_talk(four: Processes, where: str) -> None:
    """Nothing watches, and nobody waits: the sizes agree."""
    _check_parted(_run(four, partial(fault_programs.known_records_in_another_order, where=where), within=20), 1, 3)


def test_replays_in_another_order_are_told_after_many_replays(four: Processes) -> None:
    _check_parted(_run(four, fault_programs.many_replays, within=20), 3, 12)


def test_backwards_in_another_order_are_told(four: Processes) -> None:
    first, *rest = _run(four, fault_programs.backwards_in_another_order, within=20)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    assert head.startswith("LockstepError: ranks replayed different records, from replay number "), first
    assert ["the backward of jit(second)" in line for line in lines] == [False, True, False, False], first


def test_a_replay_that_is_tried_again_is_one(four: Processes) -> None:
    assert _run(four, fault_programs.tried_again, within=20) == [""] * 4


def test_replays_in_another_order_are_told_in_a_long_wait(four: Processes) -> None:
    _check_parted(_run(four, fault_programs.known_records_of_other_shapes, within=20), 1, 3)


def _check_parted(errors: list[str], rank: int, number: int) -> None:
    """Whether all ranks say that one has replayed ``second``, and the others ``first``."""
    first, *rest = errors
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    expected = f"LockstepError: ranks replayed different records, from replay number {number} of their group on:"
    assert head == expected
    for i, line in enumerate(lines):
        name = "second" if i == rank else "first"
        begin = (
            f"  * rank {i}: jit({name}) of fault_programs.py:{_line(f'def {name}(x: Sharded) -> Any:')}, which begins"
        )
        assert line.startswith(f"{begin} with psum over 'x' of mesh(x=4), f64["), line


def test_a_rank_that_records_alone_is_told(four: Processes) -> None:
    """The others replay, and wait for it. They hear of it, too."""
    errors = _run(four, fault_programs.a_hit_and_a_miss, within=15)
    recorded, replayed = _line("  # recorded"), _line("  # replayed")
    told, place = errors.pop(2), f"(fault_programs.py:{recorded})"
    head = f"rank 2 has come to the first replay of <lambda> (fault_programs.py:{replayed}), but in "
    assert told.startswith(f"LockstepError: {head}"), told
    for rank in (0, 1, 3):
        assert re.search(rf"  \* rank {rank} has waited \d.\d s at psum over 'x' of mesh\(x=4\), f64\[1\] ", told)
    assert told.count(place) == 3
    for error in errors:
        assert "waits in vain at psum over 'x' of mesh(x=4), f64[1] " + place in error, error
        assert f"  * rank 2 raised LockstepError: {head}" in error


def test_an_error_of_one_rank_is_told_without_a_deadline(four: Processes) -> None:
    errors = _run(four, fault_programs.raised_alone, within=10)
    assert errors.pop(2) == "KeyError: 'mine'"
    for error in errors:
        assert "waits in vain at psum over 'x' of mesh(x=4), f64[2] (fault_programs.py:" in error
        assert "  * rank 2 raised in shard_map(body) KeyError: 'mine' (fault_programs.py:" in error


def test_an_error_of_one_rank_is_told_to_those_that_wait_for_a_message(four: Processes) -> None:
    errors = _run(four, fault_programs.raised_before_a_message, within=15)
    assert errors.pop(2) == "KeyError: 'mine'"
    for error in errors:
        assert error.startswith("PeerError: rank "), error
        assert " at ppermute over 'x' of mesh(x=4), f64[2] (fault_programs.py:" in error
        assert "  * rank 2 raised in shard_map(body) KeyError: 'mine' (fault_programs.py:" in error


def test_an_error_of_one_rank_is_told_to_those_that_make_a_group(four: Processes) -> None:
    errors = _run(four, fault_programs.raised_before_a_group, within=10)
    assert errors.pop(2) == "KeyError: 'mine'"
    assert errors.pop(2).startswith("PeerError: rank 3 waits in vain at psum over 'y' of mesh(x=2, y=2), f32[2, 1] (")
    assert errors == ["", ""]


@pytest.mark.parametrize(
    ("program", "rank", "label"),
    [
        (fault_programs.another_tensor, 2, "given of shard_map(<lambda>), f32[8], with the bits "),
        (fault_programs.another_leaf, 3, "tree['b'] of device_put, f32[8], with the bits "),
        (
            fault_programs.another_order_of_keys,
            1,
            "the order of keys in the arguments of shard_map(<lambda>), with the bits ",
        ),
        *(
            (partial(fault_programs.another_seed, what=what), 3, "the seed of a new value, with the bits ")
            for what in ("randn", "randperm", "poisson")
        ),
        (
            partial(fault_programs.another_seed, what="a record"),
            3,
            "the state of torch's generator before jit(<lambda>), u8[5056], with the bits ",
        ),
        *(
            (
                partial(fault_programs.another_seed_of_a_body, what=name),
                3,
                f"what {name}() draws, f32[2], with the bits ",
            )
            for name in ("torch.rand", "dropout", "normal_")
        ),
        *(
            (
                partial(fault_programs.another_tensor_of_an_object, how=how),
                3,
                f"{name}, which shard_map({body}) closes over, {dtype}[2], with the bits ",
            )
            for how, name, body, dtype in (
                ("an object", "self.factors[0]", "Scale", "f32"),
                ("a method", "self.factors[0]", "scaled", "f32"),
                ("a call of a method", "scale.factors[0]", "<lambda>", "f32"),
                ("a part", "scale.factors[0]", "<lambda>", "f32"),
                ("a buffer", "norm.running_mean", "<lambda>", "f64"),
            )
        ),
        (fault_programs.another_static_argument, 1, "known[0] of shard_map(<lambda>), with the bits "),
        (
            fault_programs.another_closed_over_tensor,
            3,
            "model.weight, which shard_map(<lambda>) closes over, f64[2, 2], with the bits ",
        ),
        (
            fault_programs.another_closed_over_number,
            0,
            "rate, which shard_map(<lambda>) closes over, with the bits ",
        ),
        (fault_programs.another_tensor_of_a_record, 2, "tree['t'] of jit(<lambda>), f32[8], with the bits "),
        (fault_programs.another_static_argument_of_a_record, 3, "power of jit(<lambda>), with the bits "),
        (
            fault_programs.another_closed_over_tensor_of_a_record,
            3,
            "weights[1], which jit(<lambda>) closes over, f32[8], with the bits ",
        ),
        (
            fault_programs.another_order_of_keys_in_a_record,
            1,
            "the order of keys in tree of jit(<lambda>), with the bits ",
        ),
    ],
)
def test_another_value_is_told(four: Processes, program: Callable[[int], Any], rank: int, label: str) -> None:
    first, *rest = _run(four, program, within=10)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    assert head == "LockstepError: ranks pass other values where all must pass one global value:"
    texts = [line.removeprefix(f"  * rank {i}: {label}") for i, line in enumerate(lines)]
    bits = [text.partition(" (fault_programs.py:")[0] for text in texts]
    assert all(len(text) == 16 for text in bits), first
    assert [text == bits[rank] for text in bits] == [i == rank for i in range(4)]
    assert len({*bits}) == 2


@pytest.mark.parametrize(
    ("what", "label", "mine", "others"),
    [
        ("a number", "argument 2 of *", "0.25", "0.5"),
        ("a zero", "argument 2 of *", "-0.0", "0.0"),
        ("a kind of number", "argument 2 of *", "1.0", "1"),
        ("a number by name", "alpha of add()", "3", "2"),
        ("a tensor", "argument 1 of -", "f32[8], with the bits ", "f32[8], with the bits "),
        ("a tensor in a list", "tensors[1] of cat()", "f64[8], with the bits ", "f64[8], with the bits "),
        ("a dim", "dim of sum()", "1", "0"),
        ("a layout", "argument 1 of +", "f32[8] on mesh(x=4)", "f32[8@x] on mesh(x=4)"),
    ],
)
def test_another_operand_is_told(four: Processes, what: str, label: str, mine: str, others: str) -> None:
    """The value comes in a torch function on `Sharded` values."""
    first, *rest = _run(four, partial(fault_programs.another_operand, what=what), within=10)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    values = "ranks pass values of other layouts:" if what == "a layout" else "ranks pass other values where all must "
    assert head.startswith(f"LockstepError: {values}"), first
    for rank, line in enumerate(lines):
        text = mine if rank == 2 else others
        end = "" if text.endswith("bits ") else " (fault_programs.py:"
        assert line.startswith(f"  * rank {rank}: {label}, {text}{end}"), first
    assert len({line.partition(": ")[2] for line in lines}) == 2, first


@pytest.mark.parametrize(
    ("program", "rank", "label", "layouts"),
    [
        (
            fault_programs.another_global_shape,
            1,
            "given of shard_map(<lambda>)",
            (", f32[8@x] on mesh(x=4) as P('x')", ", f32[16@x] on mesh(x=4) as P('x')"),
        ),
        (
            fault_programs.another_spec,
            2,
            "tree['b'] of shard_map(<lambda>)",
            (", f32[8] on mesh(x=2, y=2) as P()", ", f32[8] on mesh(x=2, y=2) as P('y')"),
        ),
        (
            fault_programs.another_spec_of_a_value,
            3,
            "tree['b'] of device_put",
            (" as P()", " as P('x')"),
        ),
        (
            fault_programs.another_global_shape_in_a_record,
            1,
            "given of jit(<lambda>)",
            (", f32[8@x] on mesh(x=4)", ", f32[16@x] on mesh(x=4)"),
        ),
    ],
)
def test_another_layout_is_told(
    four: Processes, program: Callable[[int], Any], rank: int, label: str, layouts: tuple[str, str]
) -> None:
    """Also where the collectives of all ranks have one shape."""
    first, *rest = _run(four, program, within=10)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    assert head == "LockstepError: ranks pass values of other layouts:"
    for i, line in enumerate(lines):
        assert line.startswith(f"  * rank {i}: {label}{layouts[i == rank]} (fault_programs.py:"), first


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (fault_programs.keys_in_another_order, "shard_map(<lambda>)"),
        (fault_programs.keys_in_another_order_after_others, "shard_map(<lambda>)"),
        (fault_programs.keys_in_another_order_in_a_record, "jit(<lambda>)"),
        (fault_programs.keys_of_an_ordered_dict_in_another_order, "shard_map(<lambda>)"),
        (fault_programs.keys_of_a_default_dict_in_another_order, "shard_map(<lambda>)"),
        (fault_programs.keys_in_another_order_once_more, "shard_map(<lambda>)"),
        (fault_programs.keys_in_another_order_in_a_record_once_more, "jit(<lambda>)"),
    ],
)
def test_keys_in_another_order_are_told(four: Processes, program: Callable[[int], Any], name: str) -> None:
    """Without `debug`, and before the rank communicates. The others hear of it where they wait for it."""
    errors = _run(four, program, within=20)
    own = errors.pop(1)
    assert own.startswith(f"LockstepError: {name} (fault_programs.py:"), own
    assert "have another order on rank 1 than on rank " in own, own
    assert own.count("['w'][0]['") == 2, own
    assert all("rank 1 raised LockstepError: " in error for error in errors), errors


def test_a_circle_of_ranks_is_told(four: Processes) -> None:
    """Each waits for another one over another axis: no hash differs."""
    first, *rest = _run(four, fault_programs.another_order, within=4)
    assert rest == [first] * 3
    head, *lines, _ = first.splitlines()
    assert head == "LockstepError: ranks wait for each other in a circle:"
    for rank, after, axis in ((0, 1, "y"), (1, 3, "x"), (3, 2, "y"), (2, 0, "x")):
        (line,) = [line for line in lines if line.startswith(f"  * rank {rank} waits for rank {after} at ")]
        assert f" at psum over '{axis}' of mesh(x=2, y=2), f64[4] (fault_programs.py:" in line


def test_a_wait_in_another_group_is_told(four: Processes) -> None:
    for error in _run(four, fault_programs.another_axis, within=10):
        assert error.startswith("LockstepError: ranks ran different collectives, from collective number "), error
        (line,) = [text for text in error.splitlines() if text.startswith("  * rank 2: ")]
        assert f" over 'y' of mesh(x=2, y=2), f32[2] (fault_programs.py:{_line('  # wrong axis')})" in line, error


def test_ranks_without_a_common_group_are_told(four: Processes) -> None:
    for error in _run(four, fault_programs.axes_in_another_order, within=10):
        assert error.startswith("LockstepError: ranks ran different collectives, from collective number 6 of"), error
        assert "rank 2: psum over " in error, error


@pytest.mark.parametrize("how", ["checked", "unchecked", "recorded", "in lockstep"])
def test_axes_in_another_order_at_one_line_are_told(four: Processes, how: str) -> None:
    """Each group has the same calls. Their places in the body differ."""
    errors = _run(four, partial(fault_programs.axes_in_another_order_at_one_line, how=how), within=15)
    parted = [error for error in errors if error.startswith("LockstepError: ranks ")]
    told = len(parted) == 4 or how in ("recorded", "in lockstep")  # rank 1 is in no group with rank 2
    assert told, errors
    assert all("  * rank 2: " in error for error in parted), errors
    assert any(len(re.findall(r"\), after 1 other( collective)?\n", error)) == 1 for error in parted), errors
    assert len(parted) >= 2, errors
    assert "" not in errors


@pytest.mark.parametrize(
    ("program", "mine", "others"),
    [
        (fault_programs.no_memory, "RuntimeError: ", "rank 2 has left the block with RuntimeError: "),
        (fault_programs.early_end, "LockstepError: ", "rank 2: none; the last was psum over 'x' of mesh(x=4)"),
    ],
)
def test_a_rank_that_does_not_go_on_is_told(
    four: Processes, program: Callable[[int], Any], mine: str, others: str
) -> None:
    errors = _run(four, program, within=10)
    assert errors.pop(2).startswith(mine)
    assert all(others in error for error in errors), errors


def test_a_message_that_does_not_come_is_told(four: Processes) -> None:
    errors = _run(four, fault_programs.no_message, within=10)
    assert errors[0] == errors[2] == errors[3] == ""
    assert re.match(r"DeadlineError: rank 1 has waited [1-9]", errors[1]), errors[1]
    assert "s at ppermute over 'x' of mesh(x=4), f64[2] (fault_programs.py:" in errors[1]


def test_backward_names_the_line_of_forward(four: Processes) -> None:
    forward = _line("  # forward")
    for rank, error in enumerate(_run(four, fault_programs.in_backward, within=10)):
        if rank == 2:
            assert error == ""
            continue
        assert re.match(rf"DeadlineError: rank {rank} has waited [1-9]", error), error
        assert f"(backward, fault_programs.py:{_line('  # backward')}, for fault_programs.py:{forward})" in error
        assert "  * rank 2 runs outside of collectives; it has come to no collective there" in error


@pytest.mark.parametrize("kind", ["psum", "all_gather", "psum_scatter", "all_to_all"])
@pytest.mark.parametrize("is_handle", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.one_of(4)
def test_each_wait_ends_at_its_deadline(four: Processes, kind: str, is_handle: bool, is_backward: bool) -> None:
    program = partial(fault_programs.late, kind=kind, is_handle=is_handle, is_backward=is_backward)
    errors = _run(four, program, within=8)
    assert errors.pop(2) == ""
    for error in errors:
        head = r"DeadlineError: rank \d has waited [1-9]\.\d s at \w+ over 'x' of mesh\(x=4\)"
        assert re.match(head, error), error
        assert "fault_programs.py:" in error, error
        assert "  * rank 2 runs outside of collectives" in error, error


def test_a_stopped_rank_is_told(four: Processes) -> None:
    errors = _run(four, fault_programs.stopped, within=15)
    for rank in (0, 1, 3):
        assert errors[rank].startswith(f"DeadlineError: rank {rank} has waited 2."), errors[rank]
        assert "  * rank 2 has given no sign of life for " in errors[rank]
    assert errors[2].startswith("PeerError: rank 2 waits in vain at psum over 'x'"), errors[2]
    assert "  * rank 0 has left the block with DeadlineError: rank 0 has waited 2." in errors[2]


def test_an_error_of_one_rank_is_told(four: Processes) -> None:
    errors = _run(four, fault_programs.raised, within=10)
    assert errors.pop(2) == "KeyError: 'mine'"
    for error in errors:
        assert error.startswith("PeerError: rank "), error
        assert "waits in vain at psum over 'x' of mesh(x=4), f64[2] (fault_programs.py:" in error
        assert "  * rank 2 has left the block with KeyError: 'mine'" in error


def test_an_interrupt_is_told_with_the_line_of_the_user(four: Processes) -> None:
    """And not with that of Python's library, in which a wait for a message waits."""
    errors = _run(four, fault_programs.interrupted_in_a_message, within=15)
    assert errors.pop(2) == "KeyError: 'interrupted'"
    line = _line("  # waits for a message")
    assert errors.pop(2) == ""  # its message has come
    for error in errors:
        assert f"  * rank 2 has left the block with KeyboardInterrupt (fault_programs.py:{line})" in error, errors


@pytest.mark.parametrize("when", ["within", "handled", "before"])
def test_an_interrupt_ends_the_wait_for_a_message(four: Processes, when: str) -> None:
    """Only where it raises ``KeyboardInterrupt``, and comes within the wait."""
    found = four.run(partial(fault_programs.interrupted_outside_blocks, when=when), free_port())
    if when == "within":
        assert found[2][0] == "KeyError: 'interrupted'"
        assert found[2][1] < 6
    else:
        assert [error for error, _ in found] == [""] * 4


def test_the_first_error_is_told_also_around_a_block(four: Processes) -> None:
    errors = _run(four, fault_programs.raised_around, within=10)
    assert errors.pop(1) == "KeyError: 'mine'"
    for error in errors:
        head, *lines = error.splitlines()
        assert head.startswith("PeerError: rank "), error
        (line,) = lines
        assert line.startswith("  * rank 1 has left the block with KeyError: 'mine' (fault_programs.py:"), error


def test_a_group_that_is_never_made_is_told(four: Processes) -> None:
    errors = _run(four, fault_programs.first_of_a_group, within=10)
    alone = errors.pop(2)
    assert errors == [""] * 3
    assert alone.startswith("DeadlineError: rank 2 has waited 3."), alone
    assert " s at psum over 'y' of mesh(x=2, y=2), f64[4] (fault_programs.py:" in alone, alone


class _Work:
    """A work of Gloo that ends just after the time of its ``slices``-th wait is over, well or with an error."""

    def __init__(self, slices: int, error: str) -> None:
        self.left, self.error = slices, error

    def is_completed(self) -> bool:
        return self.left == 0

    def wait(self, limit: Any = None) -> None:
        if self.left:
            assert limit is not None
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
@pytest.mark.parametrize("slices", [0, 1, 2, 3])
def test_a_wait_may_end_just_after_its_time(slices: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_slice", (pending.SLICE,))
    with pytest.raises(PeerError, match="the connection to another rank is lost") if error else nullcontext():
        pending.wait_for((_Work(slices, error),))


def test_a_rank_that_was_stopped_itself_still_hears_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(long_waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(long_waits.Lookout, "_run", lambda self: None)
    lookout = long_waits.Lookout(needs_all=True)
    lookout.start()
    for now[0] in (0.5, 60.0, *range(61, 72)):  # stopped for a minute
        lookout.check()
    now[0] = 72.0
    with pytest.raises(PeerError, match=r"the store of torch\.distributed does not answer"):
        lookout.check()


def test_threads_leave_their_blocks_in_any_order() -> None:
    entered, left = threading.Event(), threading.Event()
    shown: list[Any] = []

    def first() -> None:
        with deadline(5):
            entered.wait(10)
        left.set()

    thread = threading.Thread(target=first)
    before = deadlines._active
    thread.start()
    while deadlines._active is before:
        time.sleep(0.001)
    with deadline(7):
        entered.set()
        left.wait(10)
        shown.append(deadlines._active and deadlines._active.seconds)
    thread.join(10)
    assert shown == [7]
    assert deadlines._active is before


@pytest.mark.parametrize(
    "program",
    [
        fault_programs.alike,
        fault_programs.alone,
        fault_programs.in_step,
        fault_programs.in_stages,
        fault_programs.slow,
        fault_programs.stopped_for_a_while,
        fault_programs.a_record_alone,
        fault_programs.a_slow_record,
        fault_programs.a_new_world,
        fault_programs.other_replays_of_other_groups,
        fault_programs.keys_in_many_orders,
        fault_programs.placed_in_any_order,
    ],
)
def test_who_does_nothing_wrong_hears_nothing(four: Processes, program: Callable[[int], Any]) -> None:
    assert _run(four, program, within=20) == [""] * 4


@pytest.mark.parametrize(
    ("into", "told"),
    [
        ("an argument", "x of shard_map(body), after a write into it, f32[4]"),
        ("a cut argument", "rows of shard_map(body), after a write into it, f32[2]"),
        ("a tensor closed over", "t, which shard_map(body) closes over, after a write into it, f32[4]"),
    ],
)
def test_other_writes_of_an_unchecked_body_are_told(four: Processes, into: str, told: str) -> None:
    errors = _run(four, partial(fault_programs.another_write, into=into), within=10)
    assert all(error.startswith("LockstepError: ranks pass other values where all must pass") for error in errors)
    assert all(f": {told}, with the bits " in error for error in errors), errors
    assert _run(four, partial(fault_programs.another_write, into="none"), within=10) == [""] * 4


def test_a_killed_rank_is_told() -> None:
    with Processes(4) as pool, pytest.raises(AssertionError) as caught:
        pool.run(fault_programs.killed, free_port())
    told = str(caught.value)
    assert "rank 2: the process ended" in told
    for rank in (0, 1, 3):
        assert (
            f"rank {rank} failed at psum over 'x'" in told
            or f"rank {rank} has waited " in told
            or (f"rank {rank} waits in vain at psum over 'x'" in told)
        ), told
    assert "PeerError: rank " in told


def test_a_process_that_the_backend_ends_is_named() -> None:
    """Without `debug`, nothing keeps a message of another size from being sent."""
    with Processes(4) as pool, pytest.raises(AssertionError) as caught:
        pool.run(fault_programs.a_larger_message, free_port())
    told = str(caught.value)
    (dead,) = [rank for rank in range(4) if f"rank {rank}: the process ended" in told]
    for rank in {0, 1, 2, 3} - {dead}:
        (error,) = [line for line in told.splitlines() if f"PeerError: rank {rank} " in line[:40]]
        assert f"rank {dead} has ended: its process " in error, told
        assert "all_gather over 'x' of mesh(x=4), f64[1, " in error, told
        assert "Gloo" not in error, told
        assert "closed by peer" not in error, told


def test_a_rank_that_is_lost_under_debug_is_told_of() -> None:
    with Processes(4) as pool, pytest.raises(AssertionError) as caught:
        pool.run(fault_programs.lost, free_port())
    told = str(caught.value)
    assert told.count("rank 2 has given no sign of life for ") >= 3, told
    assert told.count("it was last at psum over 'x' of mesh(x=4), f64[2] (fault_programs.py:") >= 3, told


def test_those_that_make_a_group_hear_that_the_store_has_ended() -> None:
    with Processes(4) as pool, pytest.raises(AssertionError) as caught:
        pool.run(fault_programs.killed_before_a_group, free_port(), seconds=60)
    told = str(caught.value).replace("\\n", "\n")
    for rank in (1, 3):
        assert f"PeerError: rank {rank} waits in vain at psum over 'x' of mesh(x=2, y=2), f64[4] (" in told, told
    assert told.count("  * the store of torch.distributed does not answer: ") == 2, told


def test_no_thread_waits_for_a_message_while_the_interpreter_ends() -> None:
    with Processes(2) as pool:
        assert pool.run(fault_programs.waits_that_the_end_of_a_process_ends) == [[True, False]] * 2


ASKED_AT_THE_END = """
import datetime
import torch.distributed as dist
from fspmd.transport import reports

store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
reports.within(0.01, lambda: store.wait(["never"], datetime.timedelta(seconds={seconds})))
"""


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4])
def test_no_call_to_the_store_returns_while_the_interpreter_ends(seconds: float) -> None:
    """It would abort the process: the thread ends within functions of C++ that must not be left so."""
    program = [sys.executable, "-c", ASKED_AT_THE_END.format(seconds=seconds)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_message_to_a_lost_rank_is_a_peer_error() -> None:
    with Processes(4) as pool, pytest.raises(AssertionError) as caught:
        pool.run(fault_programs.killed_before_a_message, free_port())
    told = str(caught.value)
    assert "PeerError: rank 1 failed at ppermute over 'x' of mesh(x=4), f64[2] (fault_programs.py:" in told, told
    assert "  * rank 2 has ended" in told.replace("\\n", "\n"), told


def test_a_process_ends_although_another_is_stopped() -> None:
    """Its group has a collective that never ends. The environment has begun `debug`, too."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "fault_programs.py")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "FSPMD_DEBUG": "10"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "stopped\n"
        _, error = ranks[0].communicate(timeout=300)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 1, error
    assert "DeadlineError: rank 0 has waited 3." in error, error
    assert "  * rank 1 has given no sign of life for " in error


def test_nothing_stands_before_a_call_outside_of_debug() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    x = device_put(torch.arange(8.0), P("x"), mesh=mesh)
    functions = []
    with debug():
        functions.append(Sharded.__torch_function__)
        assert device_get(x * 2).tolist() == [2.0 * i for i in range(8)]
        jit(lambda x: functions.append(Sharded.__torch_function__))(x)
        with deadline(5):
            functions.append(Sharded.__torch_function__)
    assert dispatch not in [function.__func__ for function in functions]
    assert Sharded.__torch_function__.__func__ is dispatch
    with deadline(5):
        assert Sharded.__torch_function__.__func__ is dispatch


def test_backward_runs_after_a_log_has_ended() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    x = device_put(torch.arange(8.0), P("x"), mesh=mesh).requires_grad_()
    with debug():
        with communication_log():
            total = reshard(x.square(), P()).sum()
        (grad,) = torch.autograd.grad(total, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
    assert device_get(grad).tolist() == [2.0 * i for i in range(8)]
    assert device_get(second).tolist() == [2.0] * 8


def test_a_slow_rank_is_not_the_one_that_differs() -> None:
    """It has come less far, for values hold nobody up."""
    values = {rank: {1: (7, "a, with the bits 1"), 2: (8, f"b, with the bits {rank // 2}")} for rank in range(4)}
    del values[1][2]
    values[3][2] = (9, values[3][2][1])
    head, *lines, _ = parting_text(values).splitlines()
    assert head == "ranks pass other values where all must pass one global value:"
    assert lines[1] == "  * rank 1: none; the last was a, with the bits 1"
    assert lines[3] == "  * rank 3: b, with the bits 1"
    del values[0][2], values[2][2]
    head, *lines, _ = parting_text(values).splitlines()
    assert head == "ranks ran different collectives, from collective number 2 of their group in this block on:"


def _passed(*values: str) -> CallSites:
    """The sites of a rank that comes to two lines: to one with each of these values, and to the other each time."""
    sites, mesh = CallSites(), make_mesh((4,), ("x",), transport="simulation")
    for value in values:
        rows = [ArgumentRow(f"{name} of f", f", {value}", True) for name in "abcdefg"]
        sites.come(mesh, "f", (line_of("train.py:1"), 0), crc32(value.encode()), lambda rows=rows: rows.__iter__)
        sites.come(mesh, "g", (line_of("train.py:2"), 0), 7, lambda: [ArgumentRow("t of g", ", 1.5", False)].__iter__)
    return sites


def _told(*ranks: CallSites | None) -> str:
    """The error for the first two ranks, and others."""
    key = parted(*(each.table() for each in ranks[:2] if each))
    found = [each and each.find(key) for each in ranks]
    return site_text({rank: site.text() if site else "" for rank, site in enumerate(found)})


def test_what_was_passed_is_kept_without_tensors() -> None:
    x = device_put(torch.ones(8, 2), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    plain = torch.ones(2, dtype=torch.float64)
    given = torch.where, (x, plain), {"other": [x, 0.5]}
    held = [weakref.ref(each) for each in (x, x.local, plain)]
    rows = kept_rows(*given, numbers_of(arguments(*given[1:])))
    del x, plain, given
    assert [each() for each in held] == [None] * 3
    names = ["condition", "self", "other[0]", "other[1]"]
    layouts = [", f32[8@x, 2] on mesh(x=4)", ", f64[2], with the bits ", ", f32[8@x, 2] on mesh(x=4)", ", 0.5"]
    for row, name, text in zip(rows(), names, layouts, strict=True):
        assert row.label == f"{name} of where()"
        assert row.text.startswith(text)


class _Store:
    """A store whose first connection does not open."""

    def __init__(self, prefix: str = "", of: Any = None) -> None:
        self.prefix, self.of, self.count = prefix, of, 0
        self.opens = threading.Event()

    @property
    def underlying_store(self) -> Any:
        return self.of

    def clone(self) -> Any:
        self.count += 1
        if self.count == 1:
            self.opens.wait(20)
        return f"connection {self.count}"


def test_a_connection_that_does_not_open_holds_up_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    base = _Store()
    monkeypatch.setattr(reports, "store_of_ranks", lambda prefix: _Store(prefix, base))
    monkeypatch.setattr(reports, "_clones", [])
    first = threading.Thread(target=reports.own_store, args=("a",))
    first.start()
    while not base.count:
        time.sleep(0.001)
    assert (reports.own_store("b").prefix, reports.own_store("b").of) == ("b", "connection 2")
    base.opens.set()
    first.join(20)
    assert reports.own_store("c").of == "connection 2"


def test_lines_are_compared_where_ranks_have_come_equally_often() -> None:
    same = [_passed(*values).table() for values in (["i", "i"], ["i", "i"], ["j"])]
    assert parted(same[0], same[1]) == parted(same[0], same[2]) == parted({}, same[0]) == ""
    assert parted(_passed("i", "j", "j").table(), _passed("i", "i", "j").table())
    assert _passed("i").table((1, 3)) == _passed("i").table()
    assert _passed("i").table((3, 4)) == {}  # rank 4 is not on the mesh


def test_the_first_difference_of_a_line_is_told() -> None:
    head, *lines, advice = _told(_passed("i", "i", "k"), _passed("i", "j", "k"), None).splitlines()
    assert head == "ranks pass values of other layouts:"
    assert lines == [
        "  * rank 0: a of f, i; b of f, i; c of f, i; d of f, i; and 3 more (train.py:1)",
        "  * rank 1: a of f, j; b of f, j; c of f, j; d of f, j; and 3 more (train.py:1)",
        "  * rank 2: has told of no such call",
    ]
    assert advice.startswith("the layout of a value must not depend on the rank: ")


def test_a_difference_of_a_line_long_ago_is_told() -> None:
    after = [str(i) for i in range(100)]
    _, *lines, _ = _told(_passed("i", *after), _passed("j", *after)).splitlines()
    assert lines == [f"  * rank {i}: other values before its last 64 (train.py:1)" for i in range(2)]


@pytest.mark.parametrize("wrong", [0, -1, True, "1", float("nan"), None])
def test_seconds_and_counts_are_above_zero(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="deadline got seconds="), deadline(wrong):
        pass
    if wrong is not None:
        with pytest.raises(ArgumentError, match="debug got seconds="), debug(seconds=wrong):
            pass
    with pytest.raises(ArgumentError, match="debug got every="), debug(wrong):
        pass
