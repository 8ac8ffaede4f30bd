"""Gloo processes beside the simulation: every collective, dtype, uneven size and mesh, values and gradients."""

from __future__ import annotations

import io
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import reshard_programs
import torch
from collective_cases import (
    CALLS,
    Case,
    every_case,
    expected,
    inputs,
    moved,
    rounded,
    run_case,
    same,
    some_cases,
)
from compile_programs import collectives_of_all, compiled_functions
from dtensor_programs import (
    dtensors_in_fewer_pieces,
    dtensors_where_none_are_taken,
    flattened_dtensors,
    gradients_of_dtensors,
    layouts_of_dtensors,
    specs_as_dtensors,
)
from full import FULL
from gloo_programs import (
    MISTAKES,
    ONLY_PROCESSES,
    SEEN_EARLIER,
    clipped_and_stepped,
    complaint,
    complaints,
    complaints_outside_a_mesh,
    convolved_on_processes,
    convolved_thrice_differentiated,
    cut_off_in,
    ended_sum_hooked_and_written,
    functions_of_a_step,
    leaves_differentiated,
    leaves_on_processes,
    lent_without_a_gradient,
    settled_whatever_the_garbage,
    steps_of_training,
    tables_beside_a_batch,
    zeros_travel,
)
from number_programs import numbers_on_processes
from placement_cases import RESULTS, Placement, expected_placement, run_placement, some_placements
from processes import Processes
from ragged_cases import Ragged, expected_ragged, run_ragged, some_ragged
from saved_programs import checkpoints, optimizer_states, pickled_blocks
from torch import Tensor

from fspmd import MeshError, P, communication_log, debug, lockstep

_CHUNK = 500


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def six() -> Iterator[Processes]:
    with Processes(6) as pool:
        yield pool


# --- every collective -----------------------------------------------------------------------------------------------

Packed = tuple[torch.dtype, tuple[int, ...], bytes]


def pack(x: Tensor) -> Packed:
    """A tensor as bytes, to be sent between processes."""
    x = x.detach().resolve_conj().resolve_neg()
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1))  # a view of one element may have any stride
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return x.dtype, tuple(x.shape), raw


def unpack(packed: Packed) -> Tensor:
    dtype, shape, raw = packed
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape)


def run_on_gloo(cases: list[Case]) -> list[Any]:
    """Per case what this process computed, None where it is no member, or the traceback."""
    found: list[Any] = []
    for case in cases:
        try:
            results = run_case(case, "process_group")
            found.append(None if results is None else [pack(one) for (one,) in results])
        except Exception:
            found.append(traceback.format_exc())
    return found


def compare(case: Case, on_gloo: list[Any]) -> str:
    """What differs between the judge, the simulation and the processes, or ""."""
    given = inputs(case)
    judge = expected(case, given)
    simulated = run_case(case, "simulation")
    assert simulated is not None
    ranks = case.mesh("simulation").ranks
    for name, reference, ours in zip(("y", "gx", "gct"), (judge.y, judge.gx, judge.gct), simulated, strict=False):
        bits, close = name == "y" and moved(case), name != "y" and rounded(case)
        i = ("y", "gx", "gct").index(name)
        for position, rank in enumerate(ranks):
            there = on_gloo[rank]
            if isinstance(there, str):
                return f"rank {rank}: {there}"
            got = unpack(there[i])
            if not same(ours[position], reference[position], bits, close):
                return f"{name} at {position} in the simulation: {ours[position]}\nbut the judge: {reference[position]}"
            if not same(got, ours[position], bits, close and case.n & (case.n - 1) > 0):
                return f"{name} of rank {rank} on Gloo: {got}\nbut in the simulation: {ours[position]}"
    outside = set(range(case.world)) - set(ranks)
    return "" if all(on_gloo[rank] is None for rank in outside) else "a rank outside the mesh took part"


def check(pool: Processes, cases: list[Case]) -> None:
    failures = []
    for start in range(0, len(cases), _CHUNK):
        part = cases[start : start + _CHUNK]
        on_gloo = pool.run(run_on_gloo, part)
        for i, case in enumerate(part):
            if wrong := compare(case, [found[i] for found in on_gloo]):
                failures.append(f"{case}\n{wrong}")
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n" + "\n\n".join(failures[:5])


@pytest.mark.parametrize("part", range(24 if FULL else 1))
def test_every_collective_on_four_processes(four: Processes, part: int) -> None:
    check(four, every_case(4)[part::24] if FULL else some_cases(4))


@pytest.mark.parametrize("part", range(48 if FULL else 1))
def test_every_collective_on_six_processes(six: Processes, part: int) -> None:
    check(six, every_case(6)[part::48] if FULL else some_cases(6)[::6])


def test_the_sample_has_every_dtype_of_every_call() -> None:
    sample = some_cases(4)
    assert {(case.call, case.dtype) for case in sample} >= {(call, d) for call, ds in CALLS.items() for d in ds}


def test_tangents_of_zeros_travel_though_they_have_no_memory(four: Processes) -> None:
    assert four.run(zeros_travel) == [[32.0] * 5] * 4


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_empty_blocks_leave_no_collective_out(four: Processes, check: bool) -> None:
    want = convolved_thrice_differentiated(None, check)
    for found in four.run(convolved_on_processes, check):
        assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("w", "x", "most"),
    [
        (P(), P("x"), 1),  # both uses of the weight share the sum of its gradient
        (P("x"), P(None, "x"), 2),  # each product is a pending sum, whose gradient all ranks have
    ],
)
def test_gradients_of_gradients_on_processes(four: Processes, w: P, x: P, most: int) -> None:
    want = leaves_differentiated()
    for found, calls in four.run(leaves_on_processes, w, x):
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-12, atol=1e-12)
        assert calls == most


def test_an_ended_sum_has_hooks_and_is_written_into_as_any_value(four: Processes) -> None:
    for found, want in four.run(ended_sum_hooked_and_written):
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("watcher", [nullcontext, communication_log, debug, lockstep])
def test_who_has_no_gradient_takes_part_in_the_sum(four: Processes, watcher: Any) -> None:
    first, *others = four.run(lent_without_a_gradient, (1, 2, 3), watcher)
    assert "returned None for its gradient on this rank only" in first
    assert others == ["tensor(3.)"] * 3
    assert four.run(lent_without_a_gradient, (), watcher) == ["None"] * 4


@pytest.mark.parametrize("where", ["checked", "unchecked", "rule"])
def test_none_for_a_gradient_on_some_ranks_is_zero(four: Processes, where: str) -> None:
    """All ranks have gradients then, and none is left waiting: those of what the others computed alone."""
    rows = torch.linspace(0, 1, 48, dtype=torch.float64).view(4, 2, 6).requires_grad_()
    w = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3).requires_grad_()
    found = four.run(cut_off_in, where, (0, 2))
    x_grad, w_grad = torch.autograd.grad((rows[[0, 2]] @ w).sin().sum(), (rows, w))
    for rank, sums in enumerate(found):
        assert sums == pytest.approx([float(x_grad[rank].sum()), float(w_grad.sum())])


# --- ragged exchanges -----------------------------------------------------------------------------------------------


def exchange_on_gloo(cases: list[Ragged]) -> list[Any]:
    """Per case what this process computed, None where it is no member, or the traceback."""
    found: list[Any] = []
    for case in cases:
        try:
            with communication_log():  # which reckons what this rank sends
                results = run_ragged(case, "process_group")
            found.append(None if results is None else [pack(one) for (one,) in results])
        except Exception:
            found.append(traceback.format_exc())
    return found


def test_ragged_exchanges_are_those_of_the_loop(four: Processes) -> None:
    cases = some_ragged(2000 if FULL else 30, seed=1)
    failures = []
    on_gloo = four.run(exchange_on_gloo, cases)
    for i, case in enumerate(cases):
        judged = expected_ragged(case)
        for position, rank in enumerate(case.mesh("simulation").ranks):
            there = on_gloo[rank][i]
            if isinstance(there, str):
                failures.append(f"{case}\nrank {rank}: {there}")
            elif not all(
                same(unpack(got), blocks[position], bits=name == 0)
                for name, (got, blocks) in enumerate(zip(there, judged, strict=True))
            ):
                failures.append(f"{case}\nrank {rank} differs from the judge")
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n" + "\n\n".join(failures[:5])


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_all_ranks_fail_alike_and_go_on(four: Processes) -> None:
    names = [*MISTAKES, *ONLY_PROCESSES]
    found = four.run(complaints, names)
    for i, name in enumerate(names):
        texts = {on_rank[i] for on_rank in found}
        assert len(texts) == 1, f"{name}: ranks differ: {texts}"
        (text,) = texts
        assert "Error: " in text, f"{name}: {text}"
        if name in MISTAKES:
            simulated = complaint(MISTAKES[name], "simulation")
            assert simulated == text or (name in SEEN_EARLIER and "Error: " in simulated), name


# --- values put on a mesh and taken off -----------------------------------------------------------------------------


def place_on_gloo(cases: list[Placement]) -> list[Any]:
    """Per case the results on this process, None where it is no member, or the traceback."""
    found: list[Any] = []
    for case in cases:
        try:
            results = run_placement(case, "process_group")
            found.append(None if results is None else [pack(one) for (one,) in results])
        except Exception:
            found.append(traceback.format_exc())
    return found


def check_placement(case: Placement, on_gloo: list[Any]) -> str:
    judge = expected_placement(case)
    simulated = run_placement(case, "simulation")
    assert simulated is not None
    for i, (name, ours) in enumerate(zip(RESULTS, simulated, strict=False)):
        bits = "gradient" not in name and name != "second" and not case.unreduced
        for position, rank in enumerate(case.mesh("simulation").ranks):
            if isinstance(on_gloo[rank], str):
                return f"rank {rank}: {on_gloo[rank]}"
            reference, got = judge[name][position], unpack(on_gloo[rank][i])
            if not same(got, reference, bits):
                return f"{name} of rank {rank} on Gloo: {got}\nbut the judge: {reference}"
            if name == "second" or (name == "scattered gradient" and position != case.source):
                continue
            if not same(ours[position], reference, bits):
                return f"{name} at {position} in the simulation: {ours[position]}\nbut the judge: {reference}"
    return ""


def test_leaves_of_a_tree_are_global(four: Processes) -> None:
    """Blocks in their place would be clipped by each rank's own norm."""
    for found in four.run(clipped_and_stepped, True):
        torch.testing.assert_close(found, clipped_and_stepped(False))


def test_values_put_on_a_mesh_come_back_as_they_were(four: Processes) -> None:
    cases = some_placements(2000 if FULL else 20)
    failures = []
    for start in range(0, len(cases), _CHUNK):
        part = cases[start : start + _CHUNK]
        on_gloo = four.run(place_on_gloo, part)
        for i, case in enumerate(part):
            if wrong := check_placement(case, [found[i] for found in on_gloo]):
                failures.append(f"{case}\n{wrong}")
    assert not failures, f"{len(failures)} of {len(cases)} cases:\n" + "\n\n".join(failures[:5])


def test_torch_functions_with_other_numbers(four: Processes) -> None:
    four.run(numbers_on_processes)


def test_compiled_functions_in_bodies_of_processes(four: Processes) -> None:
    assert four.run(compiled_functions, "process_group", ("eager", "aot_eager"), 1 if FULL else 9) == [[]] * 4


def test_compiled_functions_with_collectives_of_all_processes(four: Processes) -> None:
    backends = ("eager", "aot_eager", "inductor") if FULL else ("eager",)
    assert four.run(collectives_of_all, backends) == [[]] * 4


def test_a_process_outside_a_mesh_is_told_so(four: Processes) -> None:
    *members, third, fourth = four.run(complaints_outside_a_mesh)
    assert members == [[], []]
    for said in (third, fourth):
        assert len(said) == 4
        assert all("this process is not a member of mesh(x=2); call it on members only" in one for one in said)


def test_steps_of_training_while_results_are_alive(four: Processes) -> None:
    assert max(four.run(steps_of_training)) < 1e-12


# --- blocks in files ------------------------------------------------------------------------------------------------


def test_checkpoints_hold_global_tensors(four: Processes) -> None:
    for wrong, pending, flat, in_a_tuple in four.run(checkpoints):
        assert wrong == []
        assert "its value is a pending sum; move it first: reshard(x, P(None))" in pending, pending
        assert "its blocks are no boxes of the global tensor" in flat, flat
        assert "put it into a dict" in in_a_tuple, in_a_tuple


def test_states_of_optimizers_are_saved(four: Processes) -> None:
    assert four.run(optimizer_states) == [[True, True]] * 4


def test_a_pickled_block_is_loaded_where_it_was_saved_alone(four: Processes) -> None:
    """``P("x")`` on (2, 2): ranks 0 and 1 hold the same block."""
    found = four.run(pickled_blocks)
    assert [same for same, *_ in found] == [True] * 4
    for rank, (_, _, cut, replicated, of_pair) in enumerate(found):
        if rank < 2:
            assert cut == "gave ['r', 'w']"
        else:
            assert "MeshError: a saved block of Sharded f32[5@x, 7] on mesh(x=2, y=2), x=0 (elements 0:3 of" in cut
            assert f"was loaded on rank {rank}, x=1 (elements 3:5 of dim 0); save and load a file per rank" in cut
        assert replicated == "gave torch.Size([5, 7])"
        expected = "gave torch.Size([5, 7])" if rank == 0 else "y=1 (elements" if rank == 1 else "no member of its mesh"
        assert expected in of_pair, (rank, of_pair)
    with pytest.raises(MeshError, match="was loaded where 1 processes run, but its mesh has the ranks up to 3"):
        torch.load(io.BytesIO(found[0][1]))


# --- DTensors -------------------------------------------------------------------------------------------------------


def test_dtensors_of_every_layout_are_the_same_sharded_values(four: Processes) -> None:
    """Of 392 layouts; ``full_tensor`` is the judge."""
    for found, wrong in four.run(layouts_of_dtensors, 392 if FULL else 80):
        assert found > 45, found
        assert wrong == []


def test_sharded_values_of_every_layout_are_the_same_dtensors(four: Processes) -> None:
    for wrong in four.run(specs_as_dtensors):
        reduced, flat = wrong
        assert "no DTensor has a gradient that is a pending sum" in reduced, wrong
        assert "no placements give each rank the same indices of dim 0" in flat, wrong


def test_dims_that_dtensor_has_flattened(four: Processes) -> None:
    assert four.run(flattened_dtensors) == [[]] * 4


def test_strided_shards_that_are_cut_into_fewer_pieces(four: Processes) -> None:
    assert four.run(dtensors_in_fewer_pieces) == [[]] * 4


def test_gradients_go_through_dtensors(four: Processes) -> None:
    assert four.run(gradients_of_dtensors) == [[True] * 7] * 4


def test_dtensors_are_refused_where_blocks_or_global_tensors_are_taken(four: Processes) -> None:
    for told in four.run(dtensors_where_none_are_taken):
        for name, text in told.items():
            if name.startswith("mesh of"):
                assert "Mesh.from_device_mesh(mesh)" in text, (name, text)
            elif name not in _OF_DTENSORS:
                assert "Error: " in text, (name, text)
                assert "fspmd.from_dtensor(x)" in text, (name, text)
        assert {name: part for name, part in _OF_DTENSORS.items() if part not in told[name]} == {}, told


_OF_DTENSORS = {
    "max": "Partial(max) has no equal",
    "unnamed": "its dims have no names",
    "named": "gave f32[8, 4] on mesh(x=4)",
    "other mesh": "they must agree",
    "in a body": "from_dtensor was called inside shard_map",
    "simulated": "whose ranks are simulated in this process",
}


def test_ranks_settle_alike_whatever_their_garbage(four: Processes) -> None:
    assert four.run(settled_whatever_the_garbage) == [[(1, 1)] * 2] * 4


def test_gradients_of_tables_are_summed(four: Processes) -> None:
    for kinds, error in four.run(tables_beside_a_batch):
        assert kinds == ["psum"]
        assert error < 1e-9


def test_values_move_in_one_dtype_and_gradients_in_another(four: Processes) -> None:
    four.run(reshard_programs.run, list(range(30 if FULL else 1)), (2, 2))


@pytest.mark.parametrize("biased", [False, True])
def test_a_step_of_two_layers_calls_one_function_of_python_at_most(four: Processes, biased: bool) -> None:
    """Forward, and one backward. Each costs 5 to 10 us."""
    for called in four.run(functions_of_a_step, biased):
        assert len(called) == biased, called
