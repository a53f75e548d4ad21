"""The program as data: only operations that exist, in the order of the stages, all wired up."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tiny_models import CASES, TinyModels

from seethrough.kernels import reference
from seethrough.kernels.ops import Ops
from seethrough.model.program import Op, Program
from seethrough.stages import STAGES, stage_of_value

OPERATIONS = {
    name: member
    for name, member in vars(Ops).items()
    if inspect.isfunction(member) and not name.startswith("_")
}
GIVEN = {"token_ids", "positions", "slots", "logit_rows", "batch", "kv"}


@pytest.fixture(params=CASES)
def program(request: pytest.FixtureRequest, tiny: TinyModels) -> Program:
    return tiny[request.param].program


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_reference_has_every_operation_with_the_same_parameters(name: str) -> None:
    assert parameters(getattr(reference, name)) == parameters(OPERATIONS[name])


def test_contract_is_used_whole(tiny: TinyModels) -> None:
    """No operation that no family names."""
    used = {op.kernel for name in CASES for op in tiny[name].program.ops}
    assert used == OPERATIONS.keys()


def test_operations_exist_and_take_what_they_get(program: Program) -> None:
    for op in program.ops:
        signature = inspect.signature(getattr(reference, op.kernel))
        signature.bind(*op.inputs, *op.weights, **op.attrs)


def test_every_name_is_made_before_it_is_used(program: Program) -> None:
    made = set(GIVEN)
    for op in program.ops:
        assert set(op.inputs) <= made, op
        made |= set(op.outputs)
        assert len(op.outputs) <= 1
    assert "logits" in made


def test_every_weight_is_there_and_used(program: Program) -> None:
    named = {name for op in program.ops for name in op.weights}
    ropes = {name for name in program.weights if name.startswith("rope.")}
    assert named - ropes == program.weights.keys() - ropes
    assert named & ropes <= ropes


def test_stages_are_those_of_the_table_in_its_order(program: Program) -> None:
    known = [stage.id for stage in STAGES]
    assert {op.stage for op in program.ops} <= set(known)
    # The cache is written before the scores are computed: a token reads itself from it.
    order = [*known[: known.index("S6.4")], "S6.8", *known[known.index("S6.4") :]]
    for layer in (None, *range(program.spec.n_layers)):
        places = [order.index(op.stage) for op in program.ops if op.layer == layer]
        assert places == sorted(places)


def test_values_of_the_table_are_made_in_their_stage(program: Program) -> None:
    shown = {value.name for stage in STAGES for value in stage.outputs}
    made = ({name for op in program.ops for name in op.outputs} & shown) - {"X"}  # S4's and S5's
    assert made >= {"Q", "K_heads", "O_heads", "X_prime", "X_updated", "x_last", "h", "logits"}
    for op in program.ops:
        for name in set(op.outputs) & made:
            assert op.stage == stage_of_value(name).id, op


def test_layers_come_one_after_the_other(program: Program) -> None:
    layers = [op.layer for op in program.ops if op.layer is not None]
    assert layers == sorted(layers)
    assert set(layers) == set(range(program.spec.n_layers))
    inner = [i for i, op in enumerate(program.ops) if op.layer is not None]
    assert inner == list(range(inner[0], inner[-1] + 1))


def test_operations_are_data(program: Program) -> None:
    for op in program.ops:
        assert isinstance(op, Op)
        for value in op.attrs.values():
            assert value is None or isinstance(value, (int, float, str))
