"""Trees that do not match: arity, keys, lengths, types of nodes, the tree of results, and wrong kinds of specs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fspmd import ArgumentError, P, SpecError, TreeError, psum
from mistakes import Setting, mistake


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def layer(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x * params["w"]


ONES = torch.ones(8, 4)
PARAMS = {"w": torch.ones(4), "b": torch.ones(4)}

# --- in_specs -------------------------------------------------------------------------------------------------------


@mistake(TreeError)
def too_few_specs(m: Setting) -> None:
    """shard_map(add) was called with 2 arguments, but in_specs has 1 entry; write one spec per argument"""
    m.map(add, (P("x"),), P("x"))(ONES, ONES)


@mistake(TreeError)
def too_many_specs(m: Setting) -> None:
    """shard_map(add) was called with 2 arguments, but in_specs has 3 entries; write one spec per argument"""
    m.map(add, (P("x"), P("x"), P()), P("x"))(ONES, ONES)


@mistake(TreeError)
def specs_of_one_tuple_argument(m: Setting) -> None:
    """shard_map(total) was called with 1 argument, but in_specs has 2 entries; for the entries of the one argument \
    pair write in_specs=(in_specs,)
    """

    def total(pair: tuple[Tensor, Tensor]) -> Tensor:
        return psum(pair[0] + pair[1], "x")

    m.map(total, (P("x"), P("x")), P())((ONES, ONES))


@mistake(TreeError)
def specs_are_a_dict(m: Setting) -> None:
    """shard_map(add) got the dict {'x': P('x'), 'y': P('x')} for in_specs; it is a tuple with one entry per \
    argument, such as in_specs=(P(), P()), or one P for all
    """
    m.map(add, {"x": P("x"), "y": P("x")}, P("x"))(ONES, ONES)


@mistake(TreeError)
def specs_are_a_string(m: Setting) -> None:
    """shard_map(add) got the string 'x' for in_specs; it is a tuple with one entry per argument, such as \
    in_specs=(P(), P()), or one P for all
    """
    m.map(add, "x", P("x"))(ONES, ONES)


@mistake(TreeError)
def spec_is_a_string(m: Setting) -> None:
    """shard_map(add): in_specs does not match the arguments
    * in_specs[0] is the string 'x'; write P('x')
    """
    m.map(add, ("x", P("x")), P("x"))(ONES, ONES)


@mistake(TreeError)
def spec_is_a_tuple_of_names(m: Setting) -> None:
    """shard_map(add): in_specs does not match the arguments
    * in_specs[0] is the tuple ('x', None); write P('x', None)
    """
    m.map(add, (("x", None), P("x")), P("x"))(ONES, ONES)


@mistake(TreeError)
def spec_is_a_bare_tuple_of_names(m: Setting) -> None:
    """shard_map(add): in_specs does not match the arguments
    * in_specs[0] is the string 'x'; write P('x')
    """
    m.map(add, ("x", None), P("x"))(ONES, ONES)


@mistake(TreeError)
def spec_is_the_class(m: Setting) -> None:
    """shard_map(add): in_specs does not match the arguments
    * in_specs[0] is the class P; write P()
    """
    m.map(add, (P, P("x")), P("x"))(ONES, ONES)


@mistake(TreeError)
def spec_is_a_tensor(m: Setting) -> None:
    """shard_map(add): in_specs does not match the arguments
    * in_specs[0] is a tensor of shape (8, 4); expected a P such as P('x'), or None for a static value
    """
    m.map(add, (ONES, P("x")), P("x"))(ONES, ONES)


@mistake(TreeError)
def missing_and_extra_keys(m: Setting) -> None:
    """shard_map(layer): in_specs does not match the arguments
      * params has the key 'b', in_specs[0] has not
      * in_specs[0] has the key 'bias', params has not
    give each leaf a P of its own, or one P to a whole subtree
    """
    m.map(layer, ({"w": P(), "bias": P()}, P("x")), P("x"))(PARAMS, ONES)


@mistake(TreeError)
def wrong_length(m: Setting) -> None:
    """shard_map(first): in_specs does not match the arguments
      * in_specs[0] has 3 entries, but xs has 2
    give each leaf a P of its own, or one P to a whole subtree
    """

    def first(xs: list[Tensor]) -> Tensor:
        return xs[0]

    m.map(first, ([P("x"), P("x"), P("x")],), P("x"))([ONES, ONES])


@mistake(TreeError)
def spec_deeper_than_the_argument(m: Setting) -> None:
    """shard_map(layer): in_specs does not match the arguments
    * in_specs[0]['w'] is a dict, but params['w'] is a tensor of shape (4,): write one P there
    """
    m.map(layer, ({"w": {"kernel": P()}, "b": P()}, P("x")), P("x"))(PARAMS, ONES)


@mistake(TreeError)
def dict_for_a_tuple(m: Setting) -> None:
    """shard_map(swap): in_specs does not match the arguments
      * in_specs[0] is a dict, but pair is a tuple
    give each leaf a P of its own, or one P to a whole subtree
    """

    def swap(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[1], pair[0]

    m.map(swap, ({"left": P(), "right": P()},), P())((ONES, ONES))


@mistake(TreeError)
def tuple_for_a_named_tuple(m: Setting) -> None:
    """shard_map(swap): in_specs does not match the arguments
    * in_specs[0].right is a tuple, but pair.right is a tensor of shape (8, 4): write one P there
    """

    def swap(pair: Pair) -> Pair:
        return Pair(pair.right, pair.left)

    m.map(swap, (Pair(P("x"), (P(), P())),), P())(Pair(ONES, ONES))


@mistake(TreeError)
def several_places(m: Setting) -> None:
    """shard_map(f): in_specs does not match the arguments
      * in_specs[0]['head'] is a list, but tree['head'] is a tensor of shape (8, 4): write one P there
      * tree['layers'][1] has the key 'b', in_specs[0]['layers'][1] has not
      * in_specs[1] is the string 'x'; write P('x')
    give each leaf a P of its own, or one P to a whole subtree
    """

    def f(tree: dict[str, Any], x: Tensor) -> Tensor:
        return x

    tree = {"layers": [PARAMS, PARAMS], "head": ONES}
    m.map(f, ({"layers": [P(), {"w": "x"}], "head": [P()]}, "x"), P("x"))(tree, ONES)


# --- calls ----------------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def one_spec_for_all_and_an_argument_too_few(m: Setting) -> None:
    """shard_map(add) was called with arguments that do not fit add(x, y): missing a required argument: 'y'"""
    m.map(add, P("x"), P("x"))(ONES)


@mistake(ArgumentError)
def an_argument_too_few(m: Setting) -> None:
    """shard_map(add) was called with arguments that do not fit add(x, y): missing a required argument: 'y'"""
    m.map(add, (P("x"), P("x")), P("x"))(ONES)


@mistake(ArgumentError)
def unknown_keyword(m: Setting) -> None:
    """shard_map(add) was called with arguments that do not fit add(x, y): missing a required argument: 'y'"""
    m.map(add, (P("x"), P("x")), P("x"))(ONES, z=ONES)


@mistake(ArgumentError)
def keyword_given_twice(m: Setting) -> None:
    """shard_map(add) was called with arguments that do not fit add(x, y): multiple values for argument 'x'"""
    m.map(add, (P("x"), P("x")), P("x"))(ONES, ONES, x=ONES)


@mistake(TreeError)
def keyword_without_spec(m: Setting) -> None:
    """shard_map(f): in_specs has 1 entry, none for the parameter 'scale'; write one spec per parameter, in their \
    order
    """

    def f(x: Tensor, *, scale: Tensor) -> Tensor:
        return x * scale

    m.map(f, (P("x"),), P("x"))(ONES, scale=ONES)


# --- out_specs ------------------------------------------------------------------------------------------------------


@mistake(TreeError)
def out_too_few(m: Setting) -> None:
    """shard_map(f): out_specs does not match the results
      * out_specs has 2 entries, but result has 3
    give each leaf a P of its own, or one P to a whole subtree
    """

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, x

    m.map(f, P("x"), (P("x"), P("x")))(ONES)


@mistake(TreeError)
def out_keys(m: Setting) -> None:
    """shard_map(f): out_specs does not match the results
      * result has the key 'logits', out_specs has not
      * out_specs has the key 'accuracy', result has not
    give each leaf a P of its own, or one P to a whole subtree
    """

    def f(x: Tensor) -> dict[str, Tensor]:
        return {"loss": x, "logits": x}

    m.map(f, P("x"), {"loss": P("x"), "accuracy": P()})(ONES)


@mistake(TreeError)
def out_is_a_leaf(m: Setting) -> None:
    """shard_map(f): out_specs does not match the results
    * out_specs is a tuple, but result is a tensor of shape (2, 4): write one P there
    """

    def f(x: Tensor) -> Tensor:
        return x

    m.map(f, P("x"), (P("x"),))(ONES)


@mistake(TreeError)
def out_is_a_tuple_of_names(m: Setting) -> None:
    """shard_map(f): out_specs does not match the results
    * out_specs is the tuple ('x', None); write P('x', None)
    """

    def f(x: Tensor) -> Tensor:
        return x

    m.map(f, P("x"), ("x", None))(ONES)


@mistake(TreeError)
def out_is_an_ordered_dict(m: Setting) -> None:
    """shard_map(f): out_specs does not match the results
      * result has the key 'b', out_specs has not
    give each leaf a P of its own, or one P to a whole subtree
    """

    def f(x: Tensor) -> Any:
        return OrderedDict(b=x, a=x)

    m.map(f, P("x"), {"a": P("x")})(ONES)


@mistake(ArgumentError)
def nothing_returned(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
    * result is None, but its spec is P('x'); return a tensor, or write out_specs=None
    """

    def f(x: Tensor) -> None:
        x + 1

    m.map(f, P("x"), P("x"))(ONES)


@mistake(ArgumentError)
def results_that_are_no_tensors(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
    * result['name'] is the string 'loss', not a tensor; give it None in out_specs (a static result)
    * result['sizes'][0] is the int 1, the same on all ranks; write P() for it
    """

    def f(x: Tensor) -> dict[str, Any]:
        return {"x": x, "name": "loss", "sizes": [1, None]}

    m.map(f, P("x"), P("x"))(ONES)


@mistake(SpecError)
def out_number_sharded(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
    * result is the float 1.0, the same on all ranks; write P() for it
    """

    def f(x: Tensor) -> float:
        return 1.0

    m.map(f, P("x"), P("x"))(ONES)


@mistake(TreeError)
def default_left_out(m: Setting) -> None:
    """shard_map(scaled) was called with 1 argument, but in_specs has 2 entries; write one spec per argument, or pass \
    'scale' too
    """

    def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    m.map(scaled, (P("x"), None), P("x"))(ONES)
