"""Sharded models and sharded loading with fake parts, against values computed by hand."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gac.errors import ConfigError
from gac.parallel import setup
from gac.parallel.config import ParallelConfig
from gac.parallel.sharded_loading import DISABLE_ASYNC_LOAD, ShardedLoading


class Unit(nn.Module):
    """A fake FSDP unit that records what is done to it."""

    def __init__(self, name: str, events: list) -> None:
        super().__init__()
        self.name, self.events = name, events

    def reshard(self) -> None:
        self.events.append(f"{self.name} reshard")

    def unshard(self) -> None:
        self.events.append(f"{self.name} unshard")

    def set_reshard_after_forward(self, value: bool, recurse: bool) -> None:
        assert not recurse
        self.events.append(f"{self.name} {'frees' if value else 'keeps'}")

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.events.append(f"{self.name} sync {value}")


@pytest.fixture
def units(monkeypatch):
    monkeypatch.setattr(setup, "FSDPModule", Unit)
    events: list = []
    root = Unit("root", events)
    root.layers = nn.ModuleList([Unit("a", events), Unit("b", events)])
    return root, events


def test_a_gathered_model_calls_no_collective(monkeypatch, units) -> None:
    root, events = units
    names = ["root", "a", "b"]
    assert [unit.name for unit in setup.units(root)] == names
    assert setup.units(nn.Sequential(Unit("inner", []))) == []
    monkeypatch.setattr(setup, "largest", lambda values: [values[0] + 2.0])
    assert setup.in_lockstep(root) and setup.required_calls(root, 3) == 5
    with contextlib.suppress(KeyError), setup.gathered(root, ParallelConfig()):
        assert not setup.in_lockstep(root) and setup.required_calls(root, 3) == 3
        assert events == [f"{n} {what}" for n in names for what in ("keeps", "unshard")]
        events.clear()
        # another unit, which is not gathered
        root.layers.append(Unit("c", []))
        assert setup.in_lockstep(root)
        del root.layers[2]
        raise KeyError
    after = [f"{n} {what}" for n in names for what in ("frees", "reshard")]
    assert events == ["root keeps", *after[1:]]
    assert setup.in_lockstep(root) and not any(u in setup._gathered_units for u in root.modules())
    events.clear()
    with setup.gathered(root, ParallelConfig(gather_for_rollouts=False)):
        assert setup.in_lockstep(root) and not events
    assert events == [f"{n} reshard" for n in names]
    events.clear()
    with setup.gathered(nn.Identity(), ParallelConfig()):
        assert not setup.in_lockstep(nn.Identity())


def test_a_number_of_a_sharded_tensor(monkeypatch) -> None:
    sharded = SimpleNamespace(full_tensor=lambda: torch.tensor(3.5))
    monkeypatch.setattr(setup, "DTensor", SimpleNamespace)
    assert [setup.to_float(x) for x in (sharded, torch.tensor(2.5))] == [3.5, 2.5]


def test_only_the_root_defers_the_reduction(units) -> None:
    root, events = units
    with contextlib.suppress(KeyError), setup._deferred_reduction(root):
        events.append("backward")
        raise KeyError
    assert events == ["root sync False", "backward", "root sync True"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("initialized", [True, False])
def test_a_model_is_sharded_in_a_process_group_only(monkeypatch, mode, initialized) -> None:
    monkeypatch.setattr(setup.dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(setup, "_mesh", lambda *arguments: ("mesh", *arguments))
    monkeypatch.setattr(setup, "ShardedLoading", lambda *arguments: arguments)
    accelerator, config = SimpleNamespace(device="gpu"), ParallelConfig(mode)
    sharded = mode == "fsdp" and initialized
    expected = (("mesh", accelerator, config), "gpu") if sharded else None
    assert setup.sharded_loading(accelerator, config) == expected


@pytest.mark.parametrize(("replicas", "mesh"), [(1, ((6,), ("shard",))), (2, ((2, 3), 2))])
def test_the_mesh_of_the_ranks(monkeypatch, replicas, mesh) -> None:
    monkeypatch.setattr(setup, "_meshes", [])
    monkeypatch.setattr(
        setup,
        "init_device_mesh",
        lambda device, shape, mesh_dim_names: [device, shape, mesh_dim_names],
    )
    accelerator = SimpleNamespace(num_processes=6, device=torch.device("meta"))
    made = setup._mesh(accelerator, ParallelConfig(replicas=replicas))
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    assert made == ["meta", mesh[0], names] and setup._meshes == [made]


@pytest.mark.parametrize("defer", [True, False])
def test_a_trained_and_a_frozen_model(monkeypatch, units, defer) -> None:
    root, events = units
    calls: list = []

    def shard(model, loading, policy, keep_root):
        calls.append((loading, policy.param_dtype, keep_root))
        return model

    monkeypatch.setattr(setup, "shard", shard)
    accelerator = SimpleNamespace(device="meta", prepare=lambda model: ("ddp", model))
    config = ParallelConfig(defer_reduce=defer)
    root.weight = nn.Parameter(torch.zeros(2))
    trained = setup.prepare(root, accelerator, config, torch.bfloat16, "loading")
    assert trained is root and root.training and ("no_sync" in root.__dict__) == defer
    if defer:
        with root.no_sync():
            assert events == ["root sync False"]
    frozen = setup.prepare_frozen(root, accelerator, config, None, "loading")
    assert frozen is root and not root.training and not root.weight.requires_grad
    assert calls == [("loading", torch.bfloat16, True), ("loading", None, False)]
    for prepare, frozen in ((setup.prepare, False), (setup.prepare_frozen, True)):
        model = nn.Linear(2, 1)
        prepared = prepare(model, accelerator, config, None, None)
        assert prepared is model if frozen else prepared == ("ddp", model)
        assert model.weight.is_meta and model.training == (not frozen)
        assert model.weight.requires_grad == (not frozen)


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Nested(nn.Module):
    """A layer that contains a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Layer(), nn.Parameter(torch.zeros(2))


class Family(nn.Module):
    def __init__(self, layers: list[nn.Module], names: list[str] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.others = nn.ModuleList([nn.Identity()])
        self.none = nn.ModuleList()
        self._no_split_modules = names


@pytest.mark.parametrize("keep_root", [True, False])
def test_layers_and_the_rest_are_sharded(monkeypatch, keep_root) -> None:
    calls: list = []

    class Sharded(nn.Parameter):
        pass

    def fully_shard(module, mesh, mp_policy, reshard_after_forward):
        assert (mesh, mp_policy) == ("mesh", "policy")
        calls.append((module, reshard_after_forward))
        for part in module.modules():
            for name, p in part.named_parameters(recurse=False):
                setattr(part, name, Sharded(p.detach()))

    loading = SimpleNamespace(
        mesh="mesh",
        to_meta=lambda model: calls.append(("to meta", model)),
        fill=lambda model: calls.append(("fill", model)),
    )
    monkeypatch.setattr(setup, "fully_shard", fully_shard)
    monkeypatch.setattr(setup, "DTensor", Sharded)
    layers = [Layer(), Layer(), Layer()]
    named = Family([Nested(), Layer()], ["Nested", "Layer"])
    one = Family([Nested(), Layer()], ["Nested"])
    cases = ((Family(layers), layers), (named, list(named.layers)), (one, [one.layers[0]]))
    for model, units in cases:
        assert setup.shard(model, loading, "policy", keep_root) is model
        expected = [("to meta", model), *((unit, True) for unit in units)]
        assert calls == [*expected, (model, not keep_root), ("fill", model)]
        calls.clear()
    tied = Family([Layer(), Layer()])
    tied.layers[1].weight = tied.layers[0].weight
    with pytest.raises(ConfigError, match="parallel.mode='fsdp': the layers of Family share weigh"):
        setup.shard(tied, loading, "policy", keep_root)
    assert not calls
    without = Family([], [])
    del without.layers, without.others
    with pytest.raises(ConfigError, match=r"Family could not be sharded \(layers \[\], 0 unsh"):
        setup.shard(without, loading, "policy", keep_root)
    monkeypatch.setattr(setup, "fully_shard", lambda module, **keywords: None)
    message = (
        r"\(layers \['Layer'\], 2 unsharded parameters \['layers.0.weight', 'layers.0.bias'\]\)"
    )
    with pytest.raises(ConfigError, match=message):
        setup.shard(Family([Layer()]), loading, "policy", keep_root)


@pytest.mark.parametrize(("rank", "kept"), [(0, [0, 1]), (1, [2, 3]), (2, [4])])
def test_a_rank_keeps_only_its_rows_while_loading(monkeypatch, rank, kept) -> None:
    """Five rows on three ranks; scalars, and weights that are in no file, stay whole."""
    mesh = {"shard": SimpleNamespace(get_local_rank=lambda: rank, size=lambda: 3)}
    monkeypatch.setenv(DISABLE_ASYNC_LOAD, "before")
    weight = nn.Parameter(torch.arange(10.0).view(5, 2), requires_grad=rank > 0)
    scalar, new = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.ones(3))
    weight._is_hf_initialized = scalar._is_hf_initialized = True
    weight.note = "kept"
    model = nn.Module()
    model.a, model.b = nn.Module(), nn.Module()
    with ShardedLoading(mesh, torch.device("cpu")) as loading:
        assert os.environ[DISABLE_ASYNC_LOAD] == "1"
        model.a.weight = weight
        model.b.weight = model.a.weight  # tied
        model.scalar, model.new = scalar, new
    placeholder = model.a.weight
    assert placeholder is model.b.weight is not weight
    assert placeholder.untyped_storage().nbytes() == 0 and placeholder.shape == (5, 2)
    assert placeholder.requires_grad == (rank > 0) and placeholder.note == "kept"
    assert model.scalar is scalar and model.new is new
    ((owner, rows),) = loading._rows.items()
    assert owner is placeholder and rows.tolist() == [[2 * i, 2 * i + 1] for i in kept]
    assert rows.untyped_storage().nbytes() == 8 * len(kept)  # the rest is freed
    assert os.environ[DISABLE_ASYNC_LOAD] == "before"
    later = nn.Module()
    later.weight = weight
    assert later.weight is weight  # the hook is gone
    loading.to_meta(model)
    assert model.a.weight is model.b.weight and model.a.weight.is_meta
    assert model.a.weight.requires_grad == (rank > 0) and model.scalar is scalar
    monkeypatch.delenv(DISABLE_ASYNC_LOAD)
    with loading:
        pass
    assert DISABLE_ASYNC_LOAD not in os.environ
    on_meta = model.a.weight
    filled = nn.Parameter(torch.ones(5, 2))

    def with_rows(param: Any, own: Any) -> nn.Parameter:
        assert param is on_meta and own is rows
        return filled

    monkeypatch.setattr("gac.parallel.sharded_loading._with_rows", with_rows)
    loading.fill(model)
    assert model.a.weight is model.b.weight is filled
    assert not loading._rows and not loading._placeholders
