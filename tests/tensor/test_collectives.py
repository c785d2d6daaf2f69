"""How many collectives each function of the table calls, and of which kind: one more than listed here fails.

Every call is the first form of its name with which the function is compared with torch, or one of ``OTHER_FORMS``;
what else a function does is in ``CASES``. Plain operands are parameters: their gradients take one sum. Row tensors are
counted on three ranks, tiles on a mesh of 2 x 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import test_pointwise
import test_shapes
import torch
import torch.nn.functional as F
from against_torch import Expression, Form, Operands, functions_in_table, in_place, is_in_place
from collectives import collectives, count, plus, words
from test_registry import MODULES
from torch.nn import init
from workers import Pools, on_ranks

from pyg_dist.backend.comm.group import Group
from pyg_dist.errors import MixedRowsError
from pyg_dist.grid.tile_tensor import TILES
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.registry import TABLE, Function, public_name


def labelled(t: Operands, *columns: int) -> torch.Tensor:
    return torch.zeros(9, *columns, dtype=t.x.dtype)


OTHER_FORMS: dict[str, Form] = {
    "cdist": lambda f, t: f(t.x, t.weight),
    "index_add": lambda f, t: f(labelled(t, t.F), 0, t.label, t.x),
    "index_add_": lambda f, t: f(labelled(t, t.F), 0, t.label, t.x),
    "index_reduce": lambda f, t: f(labelled(t, t.F), 0, t.label, t.x, "amax", include_self=False),
    "index_reduce_": lambda f, t: f(labelled(t, t.F), 0, t.label, t.x, "amax", include_self=False),
    "__setitem__": lambda f, t: f(t.x.detach(), t.mask, 0.0),
    "index_put": lambda f, t: f(t.x.detach(), (t.mask,), torch.tensor(0.0).double()),
    "index_put_": lambda f, t: f(t.x.detach(), (t.mask,), torch.tensor(0.0).double()),
    "t": lambda f, t: f(t.x) @ t.y,
    "T.__get__": lambda f, t: f(t.x) @ t.y,
    "H.__get__": lambda f, t: f(t.x) @ t.y,
    "mH.__get__": lambda f, t: f(t.x) @ t.y,
    "diag": lambda f, t: f(t.x @ t.y.T),
    "diagonal": lambda f, t: f(t.x @ t.y.T),
    "trace": lambda f, t: f(t.x @ t.y.T),
}
# Random numbers, gradients, text: nothing to compare with torch on plain tensors here.
UNCOMPARED: dict[str, Form] = {
    "dropout": lambda f, t: f(t.x, 0.5, True),
    "rand_like": lambda f, t: f(t.x),
    "randn_like": lambda f, t: f(t.x),
    "uniform_": lambda f, t: f(t.x.detach()),
    "normal_": lambda f, t: f(t.x.detach()),
    "exponential_": lambda f, t: f(t.x.detach()),
    "bernoulli": lambda f, t: f(t.p.detach()),
    "bernoulli_": lambda f, t: f(t.x.detach(), 0.5),
    "gumbel_softmax": lambda f, t: f(t.x, hard=True),
    "normal": lambda f, t: f(t.x, 2.0),
    "randint_like": lambda f, t: f(t.x, 5),
    "poisson": lambda f, t: f(t.p.detach()),
    "_standard_gamma": lambda f, t: f(t.p),
    "_sample_dirichlet": lambda f, t: f(t.p),
    **{name: lambda f, t: f(t.x.detach()) for name in ("random_", "log_normal_", "cauchy_")},
    "geometric_": lambda f, t: f(t.x.detach(), 0.5),
    **{name: lambda f, t: f(t.x, 0.5, True) for name in ("alpha_dropout", "feature_alpha_dropout", "feature_dropout")},
    **{name: lambda f, t: f(t.c, 0.5, True) for name in ("dropout1d", "dropout2d")},
    "dropout3d": lambda f, t: f(t.c.unsqueeze(-1).unsqueeze(-1), 0.5, True),
    "rrelu": lambda f, t: f(t.x, training=True),
    "rrelu_": lambda f, t: f(t.x.detach(), training=True),
    "_standard_gamma_grad": lambda f, t: f(t.p.detach(), t.p.detach()),
    "_dirichlet_grad": lambda f, t: f(t.p.detach(), t.p.detach(), t.p.detach() + 1),
    "_convert_indices_from_coo_to_csr": lambda f, t: f(t.label.sort()[0], 9),
    "multinomial": lambda f, t: f(t.p.detach(), 2),
    "scaled_dot_product_attention": lambda f, t: f(t.x, t.y, t.y),
    "multi_head_attention_forward": lambda f, t: f(
        *(t.x, t.y, t.y, t.F, 1, None, None, None, None, False, 0.0, torch.eye(t.F).to(t.x), None),
        **{"need_weights": False, "use_separate_proj_weight": True},
        **{f"{name}_proj_weight": torch.eye(t.F).to(t.x) for name in "qkv"},
    ),
    "data.__get__": lambda f, t: f(t.x),
    "data.__set__": lambda f, t: f(t.x, t.y.detach()),
    "grad.__get__": lambda f, t: f(t.x),
    "grad.__set__": lambda f, t: f(t.x, t.y.detach()),
    "grad.__delete__": lambda f, t: f(t.x),
    "grad_fn.__get__": lambda f, t: f(t.x),
    "retain_grad": lambda f, t: f(t.x.sin()),
    "register_post_accumulate_grad_hook": lambda f, t: f(t.x, lambda x: None),
    "register_hook": lambda f, t: f(t.x, lambda gradient: gradient * 2),
    "backward": lambda f, t: f(t.x.sin(), t.y.detach()),
    "__deepcopy__": lambda f, t: f(t.x, {}),
    "__repr__": lambda f, t: f(t.x),
    "__format__": lambda f, t: f(t.x, ""),
    "__reduce_ex__": lambda f, t: f(t.x, 4),
    "_is_view": lambda f, t: f(t.x),
    "_base.__get__": lambda f, t: f(t.x),
    "__dlpack__": lambda f, t: f(t.x),
    "__dlpack_device__": lambda f, t: f(t.x),
    "empty_like": lambda f, t: f(t.x),
    "new_empty": lambda f, t: f(t.x, (2,)),
    "new": lambda f, t: f(t.x, (2,)),
}
METADATA: dict[str, Form] = {
    **{name: lambda f, t: f(t.x) for name in test_shapes.METADATA},
    "requires_grad.__set__": lambda f, t: f(t.x, True),
    "_backward_hooks.__set__": lambda f, t: f(t.x, None),
    "is_set_to": lambda f, t: f(t.x, torch.zeros(1)),
    "_has_compatible_shallow_copy_type": lambda f, t: f(t.x, torch.zeros(1)),
}
# Functions that torch has in none of the places where names are looked up.
BY_FUNCTION: dict[str, tuple[Function, Form]] = {
    "autograd.backward": (torch.autograd.backward, lambda f, t: f([t.x.sin()], [t.y.detach()])),
    "autograd.grad": (torch.autograd.grad, lambda f, t: f([t.x.sin()], [t.x], [t.y.detach()])),
    "init.uniform_": (init.uniform_, lambda f, t: f(t.x)),
    "init.normal_": (init.normal_, lambda f, t: f(t.x)),
    "init.constant_": (init.constant_, lambda f, t: f(t.x, 2.0)),
    "init.kaiming_uniform_": (init.kaiming_uniform_, lambda f, t: f(t.x)),
}


def forms() -> dict[str, list[Form]]:
    """Calls of each function, by its name."""
    found: dict[str, list[Form]] = {name: list(forms) for module in MODULES for name, forms in module.FORMS.items()}
    found.update({name: test_pointwise.forms_of(name) for name in test_pointwise.NAMES})
    for more in (OTHER_FORMS, METADATA, UNCOMPARED):
        found.update({name: [form] for name, form in more.items()})
    return found


def calls() -> dict[Function, tuple[str, Expression]]:
    """The first form that torch takes of every function: its name, and the call."""
    found: dict[Function, tuple[str, Expression]] = {}
    for name, given in forms().items():
        for function in functions_in_table(name):
            called = in_place(function) if is_in_place(name) else function
            found[function] = name, partial(next(form for form in given if _is_taken(form, called, name)), called)
    found.update({function: (name, partial(form, function)) for name, (function, form) in BY_FUNCTION.items()})
    return found


def _is_taken(form: Form, function: Function, name: str) -> bool:
    if name in UNCOMPARED or name in METADATA:
        return True
    try:
        form(function, Operands("tall", False))
    except (TypeError, AttributeError, RuntimeError, IndexError):
        return False
    return True


# Per module: collectives of the call, of its backward pass, and the functions. Where a message carries a sum over ranks
# it is "sum", or "max" and "min"; "count" is one number of each rank, "agree" a yes or no of each.
ROWS: dict[str, list[tuple[str, str, str]]] = {
    "along": [
        ("none", "none", """
            softmin cumsum cumprod cumsum_ cumprod_ cummax cummin logcumsumexp sort argsort topk kthvalue mode
            glu roll flip gather take_along_dim vstack row_stack narrow unbind chunk split tensor_split diff
            cosine_similarity pairwise_distance repeat_interleave cat concat concatenate hstack column_stack stack
            one_hot pad normalize
        """),
        ("gather", "none", "quantile nanquantile"),
    ],
    "attention": [
        ("2 gather", "2 sum", "scaled_dot_product_attention multi_head_attention_forward"),
    ],
    "autograd": [
        ("none", "none", """
            data.__get__ data.__set__ detach grad.__get__ grad.__set__ grad.__delete__ grad_fn.__get__ retain_grad
            register_post_accumulate_grad_hook register_hook backward autograd.backward
            autograd.grad __deepcopy__
        """),
    ],
    "distributions": [
        ("none", "none", """
            normal randint_like random_ _standard_gamma _sample_dirichlet
        """),
        ("agree", "none", "poisson"),
    ],
    "full_tensor": [
        ("gather", "none", """
            tolist numpy __array__ __array_wrap__ __contains__ __reversed__ unique unique_consecutive bincount histc
            median nanmedian _convert_indices_from_coo_to_csr
        """),
        ("count, gather", "none", "item __float__ __int__ __index__ __bool__"),
        ("none", "none", "__repr__ __format__"),
        ("refused", "refused", "__reduce_ex__ _is_view _base.__get__ __dlpack__ __dlpack_device__"),
    ],
    "indexing": [
        ("count", "none", """
            __getitem__ index_select masked_select __setitem__ index_fill index_fill_ index_put index_put_
        """),
        ("count", "sum", "index_copy index_copy_"),  # of plain rows that learn
        ("none", "none", "select"),
        ("count, gather", "none", "nonzero argwhere"),
    ],
    "layers": [
        ("2 sum", "2 sum", "batch_norm"),
        ("none", "4 sum", "gru lstm rnn_tanh rnn_relu gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"),
        ("none", "sum", "linear bilinear prelu embedding cdist conv1d conv2d"),
        ("none", "none", "group_norm layer_norm rms_norm isin bucketize searchsorted relu"),
    ],
    "losses": [
        ("sum", "none", """
            cross_entropy nll_loss l1_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy
            binary_cross_entropy_with_logits kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss
            hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss
            multilabel_soft_margin_loss multi_margin_loss multilabel_margin_loss
        """),
    ],
    "pointwise": [
        ("none", "none", " ".join(name for name in test_pointwise.NAMES if name != "detach")),
        ("none", "none", "_standard_gamma_grad _dirichlet_grad"),
    ],
    "products": [
        ("sum", "none", "dist dot vdot inner einsum"),
        ("none", "sum", "matmul __matmul__ __rmatmul__ mm mv spmm"),
        ("none", "none", "bmm cross fill_diagonal_"),
        ("none", "2 sum", "addmm"),
        ("gather", "sum", "diag diagonal"),
        ("gather, sum", "sum", "trace"),
    ],
    "random": [
        ("none", "none", """
            alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d rrelu rrelu_
        """),
        ("none", "none", """
            dropout rand_like randn_like uniform_ normal_ exponential_ bernoulli bernoulli_ gumbel_softmax
            log_normal_ cauchy_ geometric_
            init.uniform_ init.normal_ init.constant_ init.kaiming_uniform_
        """),
        ("agree", "none", "multinomial"),
    ],
    "reductions": [
        ("max, sum", "none", "max"),
        ("min, sum", "none", "min"),
        ("max, min, sum", "none", "argmax"),
        ("2 min, sum", "none", "argmin"),
        ("max, sum", "none", "amax logsumexp"),
        ("min, sum", "none", "amin"),
        ("sum", "none", "vector_norm sum nansum mean count_nonzero prod"),
        ("2 sum", "none", "nanmean"),
        ("max", "none", "any _is_any_true"),
        ("min", "none", "all _is_all_true allclose equal"),
        ("none", "none", "softmax log_softmax"),
        ("sum", "none", "norm"),
        ("2 sum", "sum", "std var std_mean var_mean"),
    ],
    "scatter": [
        ("none", "none", "scatter_add scatter_add_ scatter scatter_ scatter_reduce scatter_reduce_"),
        ("sum", "none", "index_add index_add_"),
        ("2 max, sum", "none", "index_reduce index_reduce_"),
    ],
    "shapes": [
        ("none", "none", " ".join(METADATA)),
        ("none", "none", """
            shape.__get__ size numel __len__ view_as reshape_as expand_as expand broadcast_to
            repeat squeeze flatten ravel unflatten nbytes.__get__ new view reshape
            permute movedim moveaxis unsqueeze transpose swapaxes swapdims mT.__get__
        """),
        ("sum", "none", "t T.__get__ H.__get__ mH.__get__"),
    ],
}  # fmt: skip

# On the grid a function without a form for tiles is given whole rows: an all-to-all for each tile, and one in the
# backward pass for each that learns. What is written in place goes back: once more each. These have a form for tiles,
# and this is what it adds.
TILES_ADD: list[tuple[str, str, str]] = [
    ("scattered-sum", "pieces", "linear matmul __matmul__ mm spmm"),  # over columns
    ("pieces", "none", "batch_norm"),  # every rank has the running statistics of all columns
    ("2 sum", "2 sum", "layer_norm"),  # over columns, which lie on several ranks
    ("sum", "sum", "rms_norm"),
    ("all-to-all", "all-to-all", "__getitem__ index_select"),  # the form is a batch's rows; all else takes whole rows
]
# Changes of layout beyond one for each operand: calls with an operand twice, and writes; index_add_ writes to no tile.
MORE_MOVES = {
    "allclose": (1, 0), "equal": (1, 0), "__setitem__": (1, 0), "index_add_": (0, 0), "index_reduce_": (0, 0),
    "scaled_dot_product_attention": (1, 1), "multi_head_attention_forward": (1, 1),
}  # fmt: skip

# What else the functions above do: whether it needs messages depends on what they are given.
CASES: dict[str, tuple[str, str, Expression]] = {
    "plain rows are sliced": ("none", "sum", lambda t: t.x + t.full),
    "a plain row": ("none", "sum", lambda t: t.x * t.vector),
    "several parameters": ("none", "sum", lambda t: F.linear(t.x * t.vector + t.row, t.weight)),
    "a reduction within rows": ("none", "none", lambda t: t.x.sum(1)),
    "extremes within rows": ("none", "none", lambda t: t.x.max(1)),
    "the largest of all": ("max", "none", lambda t: t.x.detach().max()),
    "centred rows": ("sum", "sum", lambda t: t.x - t.x.mean(0)),
    "softmax over rows": ("max, sum", "sum", lambda t: t.x.softmax(0)),
    "one row": ("count, sum", "none", lambda t: t.x[3]),
    "a slice of rows": ("count", "none", lambda t: t.x[1:3]),
    "columns": ("none", "none", lambda t: t.x[:, 1:]),
    "a mask's elements": ("count", "none", lambda t: t.x[t.m]),
    "a plain mask": ("2 count", "none", lambda t: t.x[torch.arange(t.N) > 1]),
    "one mask, several tensors": ("count", "none", lambda t: (t.x[t.mask], t.y[t.mask], t.label[t.mask])),
    "selections of one list": ("2 count", "none", lambda t: t.x[[1, 0]] * t.y[[1, 0]]),
    "pairs": ("all-to-all, 2 count", "all-to-all", lambda t: t.x[[1, 5]] * t.y[[5, 0]]),
    "a loss of a mask": ("count, sum", "none", lambda t: F.cross_entropy(t.x[t.mask], t.label[t.mask])),
    "a loss by row": ("none", "none", lambda t: F.cross_entropy(t.x, t.label, reduction="none")),
    "accuracy": ("sum", "none", lambda t: (t.x.argmax(-1) == t.label).sum()),
    "evaluation": ("none", "sum", lambda t: F.batch_norm(t.x, t.row[0].detach(), t.class_weight, t.vector)),
    "appended rows": ("none", "none", lambda t: torch.cat([t.x, t.y])),
    "appended rows of a mask": ("count, gather", "none", lambda t: torch.cat([t.x, t.y[t.mask]])),
    "all pairs": ("gather", "sum", lambda t: t.x @ t.y.T),
    "distances of all pairs": ("gather", "sum", lambda t: torch.cdist(t.x, t.y[:, :1].expand(-1, t.F))),
    "sums by class": ("sum", "none", lambda t: labelled(t).scatter_add(0, t.label, t.v)),
    "all rows": ("gather", "none", lambda t: whole(t.x) * 2),
    "rows of a plain table": ("none", "sum", lambda t: t.table[t.label]),
    "assigned columns": ("none", "none", lambda t: assigned(t.x * 1, (slice(None), 0), 2.0)),
    "assigned rows": ("count", "none", lambda t: assigned(t.x * 1, t.mask, t.y[t.mask])),
    "number of classes": ("max", "none", lambda t: F.one_hot(t.label)),
    "an optimizer's step": ("none", "none", lambda t: t.x.detach().mul_(0.9).addcdiv_(t.y.detach(), t.p.detach() + 1)),
}  # fmt: skip


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, RowTensor) else x


def assigned(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def listed() -> dict[str, tuple[str, str, str]]:
    """The module and the two costs of each name."""
    return {
        name: (module, *costs) for module, lines in ROWS.items() for *costs, names in lines for name in names.split()
    }


def measured(on_grid: bool) -> list[tuple[str, str, bool, tuple[Any, ...]]]:
    """The name and the handler's module of each function, whether it has a form for tiles, and what it costs."""
    found = []
    for function, (name, call) in calls().items():
        # Values of rows are compared by the tests of each function.
        is_compared = on_grid and not (name in UNCOMPARED or name in METADATA or name in BY_FUNCTION)
        cost: tuple[Any, ...]
        try:
            cost = count(call, on_grid, is_compared)
        except MixedRowsError:
            cost = ("refused", "refused", 0, 0)
        found.append((name, TABLE[function].__module__.rpartition(".")[2], function in TILES, cost))
    return found


def test_every_function_is_listed() -> None:
    functions = {function: name for function, (name, _) in calls().items()}
    others = {*test_pointwise.NEEDS_GPU, torch.sparse.mm.__name__}  # which is torch.mm, elsewhere
    missing = [public_name(f) for f in TABLE if f not in functions and f.__name__ not in others]
    assert not missing, f"no call: {missing}"
    assert set(functions.values()) <= set(listed())
    unknown = [name for name in listed() if name not in BY_FUNCTION and not functions_in_table(name)]
    assert not unknown, f"not in the table: {unknown}"


@pytest.mark.parametrize("on_grid", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "tiles"])
def test_functions(workers: Pools, on_grid: bool) -> None:
    """The costs are those that are listed, on every rank; on tiles, the calls give what torch gives."""
    results = workers(4 if on_grid else 3).run(measured, on_grid)
    differ = {
        f"{name}, of {module}: {cost[:2]}, expected {want}"
        for found in results
        for name, module, has_form, cost in found
        if (module, *cost[:2]) != (listed()[name][0], *(want := _expected(name, has_form, *cost[2:])))
    }
    assert not differ, "\n".join(sorted(differ))


def _expected(name: str, has_form: bool, num_tiles: int, num_learning: int) -> tuple[str, str]:
    """The listed costs, and what tiles among the operands add."""
    _, forward, backward = listed()[name]
    added = next((extra[:2] for extra in TILES_ADD if name in extra[2].split()), ("none", "none"))
    if not num_tiles or forward == "refused":
        return forward, backward
    if has_form:
        return plus(forward, added[0]), plus(backward, added[1])
    more, more_learning = MORE_MOVES.get(name, (is_in_place(name),) * 2)
    moves, moves_back = num_tiles + more, num_learning + more_learning * (num_learning > 0)
    return plus(forward, words(["all-to-all"] * moves)), plus(backward, words(["all-to-all"] * moves_back))


@pytest.mark.parametrize("name", CASES)
def test_cases(workers: Pools, name: str) -> None:
    for found in workers(3).run(case, name):
        assert found == CASES[name][:2]


def case(name: str) -> tuple[str, str]:
    forward, backward, *_ = count(CASES[name][2], on_grid=False)
    return forward, backward


@on_ranks(3)
def test_one_more_is_seen() -> None:
    """The spy sees an all-reduce that a function makes in vain, and does not count one among one rank."""
    x = Operands("tall", True).x  # made here: the first rows of all have collectives of their own
    with collectives() as seen:
        x.sum()
        x._sharding.group.all_reduce_(torch.ones(1))
        Group().all_reduce_(torch.ones(1))
    assert words(seen) == "2 sum"
