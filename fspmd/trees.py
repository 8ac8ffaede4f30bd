"""Pytrees of arguments: flattening, prefixes of specs, key paths for messages, and nodes of other libraries."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import optree
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import TreeError
from fspmd.messages import Failure, a, counted, described, quoted, refuse
from fspmd.sharded import IN_ORDER, NODES, Sharded, is_sharded
from fspmd.spec import P
from fspmd.torch_internals import torch_nodes

_for_good = optree.dict_insertion_ordered(True, namespace=IN_ORDER)
_for_good.__enter__()


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return leaves and treedef. The leaf of a `Sharded` is its block; the treedef holds its form. None is a leaf."""
    adopt()
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True, namespace=NODES)
    return leaves, treedef


def flatten_in_order(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return `flatten` with dict keys in their own order. Treedefs of dicts in other orders then differ.

    >>> flatten({"w": 1, "b": 2})[0], flatten_in_order({"w": 1, "b": 2})[0]
    ([2, 1], [1, 2])
    """
    adopt()
    leaves, treedef = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=IN_ORDER)
    return leaves, treedef


def flatten_values(tree: Any, none_is_leaf: bool = True) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return leaves and treedef, with each `Sharded` as a leaf."""
    adopt()
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)
    return leaves, treedef


def filling(leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that makes the tree with other tensors in the places of its tensors, which it does not keep.

    Each tree has its own copies of mutable leaves: sets and arrays.

    >>> import torch
    >>> filling(*flatten({"w": torch.zeros(2), "rate": 0.5}))([torch.ones(1)])
    {'w': tensor([1.]), 'rate': 0.5}
    """
    fixed = [None if isinstance(leaf, Tensor) else copy(leaf) if is_mutable(leaf) else leaf for leaf in leaves]
    copied = [i for i, leaf in enumerate(fixed) if is_mutable(leaf)]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def filled(values: Sequence[Tensor]) -> Any:
        full = list(fixed)
        for i in copied:
            full[i] = copy(full[i])
        for i, x in zip(places, values, strict=True):
            full[i] = x
        return treedef.unflatten(full)

    return filled


def is_mutable(leaf: Any) -> bool:
    """Return whether a leaf is a set or an array."""
    return isinstance(leaf, (set, bytearray)) or hasattr(type(leaf), "__array_interface__")


@cached(maxsize=1024)
def check_keys(treedef: optree.PyTreeSpec) -> None:
    """Check that the keys of all dicts have one order, in which every rank takes their leaves.

    Raises:
        TreeError: The keys of a dict do not sort, so optree takes them in the order in which a rank has put them in.
    """
    keys = treedef.entries()
    if treedef.type in (dict, defaultdict) and len(keys) > 1 and {*map(type, keys)} not in ({str}, {int}):
        kinds = itertools.groupby(keys, lambda key: type(key).__qualname__)
        if not _ascend(keys) and not all(_ascend(list(kind)) for _, kind in kinds):
            shown = ", ".join(map(repr, keys[:_KEYS]))
            raise TreeError(
                f"the keys {{{shown}}} of a dict do not sort, so a rank that has put them in in another order would "
                "take other leaves; use strings or numbers as keys, or make an OrderedDict in one order on all ranks"
            )
    if treedef.num_nodes > treedef.num_leaves + 1:
        for child in treedef.children():
            if not child.is_leaf():
                check_keys(child)


@cached(maxsize=1024)
def has_dicts(treedef: optree.PyTreeSpec) -> bool:
    """Return whether a tree has a dict of several keys, which may be in another order on another rank."""
    if treedef.type in (dict, OrderedDict, defaultdict) and treedef.num_children > 1:
        return True
    return treedef.num_nodes > treedef.num_leaves + 1 and any(map(has_dicts, treedef.children()))


def order_of(treedef: optree.PyTreeSpec) -> list[int] | None:
    """Return the place of each leaf if dicts keep their own order, or None if it is the same."""
    places = list(range(treedef.num_leaves))
    in_order = optree.tree_leaves(treedef.unflatten(places), none_is_leaf=True, namespace=IN_ORDER)
    return None if in_order == places else sorted(places, key=in_order.__getitem__)


def _ascend(keys: list[Any]) -> bool:
    """Return whether each key is less than the next. Sets compare without an error, but have no order."""
    try:
        return all(first < second for first, second in itertools.pairwise(keys))
    except TypeError:
        return False


class Structure(NamedTuple):
    """The structure of arguments of which some are trees, as a key."""

    treedef: optree.PyTreeSpec
    forms: tuple[Any, ...]  # of the leaves; None for a leaf that is no `Sharded`


def flatten_args(args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Return leaves and a hashable structure: a `Structure`, or the tuple of forms if every argument is a leaf."""
    leaves: list[Any] = []
    forms: list[Any] = []
    for arg in args:
        if type(arg) is Sharded:
            leaves.append(arg.block)
            forms.append(arg.form)
        elif type(arg) is Tensor:
            leaves.append(arg)
            forms.append(None)
        else:
            return flatten_trees(args)
    return leaves, tuple(forms)


def flatten_trees(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of `flatten_in_order` and a hashable structure. It is faster, as no `Sharded` is a node."""
    values, treedef = flatten_in_order(tree, is_sharded)
    leaves = [x.block if type(x) is Sharded else x for x in values]
    return leaves, Structure(treedef, tuple([x.form if type(x) is Sharded else None for x in values]))


def leaf_paths(tree: Any, root: str, *, none_is_leaf: bool = True) -> list[str]:
    """Return the Python expression of each leaf; a `Sharded` is a leaf.

    >>> leaf_paths({"w": [1, None]}, "params")
    ["params['w'][0]", "params['w'][1]"]
    """
    return paths_of(optree.tree_structure(tree, none_is_leaf=none_is_leaf), root)


def paths_of(treedef: optree.PyTreeSpec, root: str) -> list[str]:
    """Return the Python expression of each leaf of a tree with this treedef."""
    return [accessor.codify(root) for accessor in treedef.accessors()]


class Label:
    """The Python expression of a leaf, made when a message shows it."""

    __slots__ = ("_at", "_paths")

    def __init__(self, paths: Callable[[], list[str]], at: int) -> None:
        self._paths, self._at = paths, at

    def __str__(self) -> str:
        return self._paths()[self._at]


def labels(treedef: optree.PyTreeSpec, roots: Sequence[str] | str) -> list[Label]:
    """Return the label of each leaf of a tree, or of a tuple of trees with a name for each. They keep no leaf.

    >>> [str(label) for label in labels(flatten({"w": [1, 2]})[1], "params")]
    ["params['w'][0]", "params['w'][1]"]
    """

    @functools.cache
    def paths() -> list[str]:
        rows = [(roots, treedef)] if isinstance(roots, str) else zip(roots, treedef.children(), strict=True)
        return [path for root, tree in rows for path in paths_of(tree, root)]

    return [Label(paths, i) for i in range(treedef.num_leaves)]


def parameter_names(f: Any, count: int) -> list[str]:
    """Return the names of the first positional parameters of ``f``, and ``args[i]`` beyond them."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def tree_text(treedef: optree.PyTreeSpec) -> str:
    """Return the text of a treedef, with ``*`` for each leaf.

    It has no addresses of objects, such as the constructor in the node of a TensorDict. So it is the same on all
    processes that have the same tree.

    >>> tree_text(flatten({"w": [1, 2]})[1])
    "{'w': [*, *]}"
    """
    text = _ADDRESS.sub("", str(treedef)).removeprefix("PyTreeSpec(").removesuffix(")")
    for namespace in (NODES, IN_ORDER):
        text = text.removesuffix(f", namespace={namespace!r}")
    return text.removesuffix(", NoneIsLeaf")


# --- prefixes: specs over trees of values, dims over trees of arguments ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Entries:
    """The leaves that a prefix may have: ``fits(leaf)``, and the advice for a leaf that does not fit."""

    fits: Callable[[Any], bool]
    advice: Callable[[Any], str]
    noun: str


def _spec_advice(leaf: Any) -> str:
    if isinstance(leaf, str):
        return f"write P({leaf!r})"
    if type(leaf) in (tuple, list):
        return f"write P({quoted(leaf)})"
    return "write P()" if leaf is P else "expected a P such as P('x'), or None for a static value"


SPECS: Final = Entries(lambda x: x is None or isinstance(x, P), _spec_advice, "P")
DIMS: Final = Entries(
    lambda x: x is None or type(x) is int, lambda _: "expected an int, or None where not mapped", "dim"
)


def broadcast_prefix(prefix: Any, tree: Any, what: str, where: str, header: str) -> list[Any]:
    """Return for each leaf of ``tree`` the leaf of ``prefix`` above it.

    ``what`` names the prefix in errors, and ``where`` the tree.

    Raises:
        TreeError: The trees differ. The message names every place.
    """
    failures: list[Failure] = []
    check_keys(optree.tree_structure(tree, none_is_leaf=True))
    result = prefix_over(prefix, tree, what, where, failures)
    if failures:
        refuse(header, failures)
    return result


def prefix_over(
    prefix: Any, tree: Any, what: str, where: str, failures: list[Failure], entries: Entries = SPECS
) -> list[Any]:
    """Return `broadcast_prefix`, but append every place where the trees differ to ``failures`` instead of raising."""
    if entries.fits(prefix):
        return [prefix] * optree.tree_structure(tree, none_is_leaf=True).num_leaves
    given = f"{what} is {described(prefix)}"
    if _is_leaf(prefix):
        failures.append(Failure(f"{given}; {entries.advice(prefix)}", TreeError))
    elif _is_leaf(tree):
        if entries is SPECS and type(prefix) in (tuple, list) and all(x is None or isinstance(x, str) for x in prefix):
            failures.append(Failure(f"{given}; {entries.advice(prefix)}", TreeError))
        else:
            here = f"{what} is {a(type(prefix).__name__)}, but {where} is {described(tree)}"
            text = f"{here}: write one {entries.noun} there"
            failures.append(Failure(text, TreeError))
    elif not _alike(prefix, tree):
        text = f"{what} is {a(type(prefix).__name__)}, but {where} is {a(type(tree).__name__)}"
        failures.append(Failure(text, TreeError, _ADVICE.format(entries.noun)))
    else:
        return _children_over(prefix, tree, what, where, failures, entries)
    return []


def _children_over(
    prefix: Any, tree: Any, what: str, where: str, failures: list[Failure], entries: Entries
) -> list[Any]:
    mine, theirs = _children(prefix), _children(tree)
    if mine.keys() == theirs.keys():
        result: list[Any] = []
        for key, (step, child) in theirs.items():
            result += prefix_over(mine[key][1], child, what + step, where + step, failures, entries)
        return result
    if isinstance(prefix, dict):
        parts = [f"{where} has the key {key!r}, {what} has not" for key in theirs if key not in mine]
        parts += [f"{what} has the key {key!r}, {where} has not" for key in mine if key not in theirs]
        if len(parts) > _KEYS + 1:
            parts[_KEYS:] = [f"{len(parts) - _KEYS} more keys differ"]
    else:
        parts = [f"{what} has {counted(len(mine), 'entry')}, but {where} has {len(theirs)}"]
    failures.extend(Failure(part, TreeError, _ADVICE.format(entries.noun)) for part in parts)
    return []


_ADVICE = "give each leaf a {0} of its own, or one {0} to a whole subtree"
_KEYS = 8  # differing keys that a message names


def _is_leaf(x: Any) -> bool:
    return bool(optree.tree_is_leaf(x, none_is_leaf=True))


def _alike(prefix: Any, tree: Any) -> bool:
    """Return whether two nodes are of one kind: of one class, both dicts, or both tuples or lists."""
    kinds = type(prefix), type(tree)
    return kinds[0] is kinds[1] or all(issubclass(k, dict) for k in kinds) or all(k in (tuple, list) for k in kinds)


def _children(node: Any) -> dict[Any, tuple[str, Any]]:
    """Return for each key the Python text of the step to the child, and the child."""
    children, _, keys, _ = optree.tree_flatten_one_level(node, none_is_leaf=True)
    accessors = optree.tree_accessors(node, is_leaf=lambda x: x is not node, none_is_leaf=True)
    steps = [accessor.codify("") for accessor in accessors]
    return {key: (step, child) for key, step, child in zip(keys, steps, children, strict=True)}


# --- nodes of other libraries -----------------------------------------------------------------------------------------

# A class that its library registered with torch's own pytrees, such as TensorDict, is a node here, too. Our trees are
# walked by optree, which does not know torch's registry.
_CONTAINERS: Final = (dict, list, tuple)  # optree decides itself whether their subclasses are leaves
_seen = 0


def adopt() -> None:
    """Register with optree the classes that were registered with torch since the last call. It is fast if none were."""
    if len(torch_nodes) != _seen:
        _adopt()


def _adopt() -> None:
    global _seen
    for kind, node in list(torch_nodes.items()):
        package = kind.__module__.split(".")[0]
        if package in ("torch", "builtins", "collections", "types") or issubclass(kind, _CONTAINERS):
            continue
        if optree.register_pytree_node.get(kind) is None:
            _register(kind, node)
    _seen = len(torch_nodes)


def _register(kind: Any, node: Any) -> None:
    keyed = torch_nodes[kind].flatten_with_keys_fn

    def flatten(x: Any) -> tuple[Any, ...]:
        children, context = node.flatten_fn(x)
        entries = None if keyed is None else tuple(map(_key, keyed(x)[0]))
        return tuple(children), _Context(kind, _sized_by(children, context)), entries

    def unflatten(context: _Context, children: Any) -> Any:
        value = context.value
        own_value = dict(value) if type(value) is dict else value  # the function may write into it
        return node.unflatten_fn(list(children), own_value)

    optree.register_pytree_node(
        kind, flatten, unflatten, path_entry_type=optree.GetItemEntry, namespace=optree.registry.__GLOBAL_NAMESPACE
    )


def _sized_by(children: Any, context: Any) -> Any:
    """Return the context of a TensorDict without its batch size, which its children then decide, blocks or global.

    Otherwise tensordict compares the sizes of new children with the batch size, and guesses where they differ.
    """
    dims = getattr(context.get("batch_size"), "batch_dims", None) if type(context) is dict else None
    if dims is None or not any(hasattr(x, "shape") for x in children):
        return context
    return {name: value for name, value in context.items() if name != "batch_size"} | {"batch_dims": dims}


def _key(entry: Any) -> Any:
    """Return the key of an entry as it stands in brackets, or torch's number for it."""
    key, _ = entry
    return next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key)


class _Context:
    """The context that torch keeps of a node besides its children. It gets a hash here."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: type, value: Any) -> None:
        self.kind, self.value = kind, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.kind is other.kind and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return repr(self.value)
