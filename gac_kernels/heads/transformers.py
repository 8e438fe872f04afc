"""The fused loss for every causal language model of transformers: `fuse(model)`.

In a call with labels, the LM head returns a `Record` in place of logits. It notes the operations
that the model applies to them (a scale, a softcap, a cast), and the model's loss function computes
the loss from the hidden states and this record: without logits, in 6 N H V FLOPs. Any other
operation on the record computes the logits. So no names of models or of configuration keys are
needed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from gac_kernels.api import fused_linear_gac_loss
from gac_kernels.contract import IGNORE, DemoWeight, LossSpec

logger = logging.getLogger(__name__)
HANDLE = "_gac_fused"  # the handle, in the __dict__ of the model and of the head's layers
OWN = "_gac_own_forward"  # the original bound method there: a deep copy rebinds it to the copy
REPLICATE = "_replicate_for_data_parallel"
LABELS = LossSpec(demo_weight=DemoWeight.ONE)
# methods that multiply (1) or divide (-1) by a number; a trailing "_": in place
SCALING = dict.fromkeys(("mul", "mul_", "__mul__", "__rmul__", "__imul__"), 1)
SCALING |= dict.fromkeys(("div", "div_", "__truediv__", "__itruediv__"), -1)
CASTS = ("float", "to", "contiguous")
OPERATORS = [f"__{x}{name}__" for name in ("add", "sub", "mul", "truediv") for x in ("", "r", "i")]
OPERATORS += ["__getitem__", "__setitem__", "__neg__", "__pow__", "__len__", "__lt__", "__gt__"]
ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf")
# what lazy logits answer without being computed
METADATA = {getattr(Tensor, name).__get__ for name in ATTRIBUTES} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.register_hook)
}


class Record:
    """Logits z = sum_i f_i (x_i W_i^T + b_i), or cap * tanh(z), that have not been computed.

    Multiplication by numbers, tanh, casts and the sum of two records (the head and its LoRA
    adapter) give a record. Everything else computes the logits, as the model would have done.

    Args:
        terms: hidden states x_i, layer with W_i and b_i, factor f_i.
        autocast: dtype of autocast during the forward pass; None: autocast was off.
        cap: None for z itself.
        ops: tensor methods, with arguments, that lead from the first layer's output to the logits.
    """

    entropy: Tensor  # set by an integration that computes it together with the log-probs

    def __init__(
        self,
        terms: tuple[tuple[Tensor, nn.Linear, float], ...],
        autocast: torch.dtype | None,
        cap: float | None = None,
        ops: tuple[tuple[str, tuple[Any, ...]], ...] = (),
    ) -> None:
        self.terms, self.autocast, self.cap, self.ops = terms, autocast, cap, ops
        self.logits: Tensor | None = None  # once computed, they replace the record
        hidden, layer, _ = terms[0]
        self.shape, self.device = (*hidden.shape[:-1], layer.weight.shape[0]), hidden.device
        dtypes = [args[0] if args else torch.float32 for op, args in ops if op in ("float", "to")]
        self.dtype = dtypes[-1] if dtypes else autocast or hidden.dtype
        self.requires_grad = torch.is_grad_enabled() and any(
            x.requires_grad for x in (*self.weights(), *(x for x, _, _ in terms))
        )

    def weights(self) -> list[Tensor]:
        """The weights and biases of the layers."""
        return [x for _, y, _ in self.terms for x in (y.weight, y.bias) if x is not None]

    def apply(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Apply the tensor method `name`: a record if it can be recorded, otherwise a tensor."""
        terms, cap = self.terms, self.cap
        value: Any = args[0] if args else None
        if self.logits is not None or keywords:
            return getattr(self.full(), name)(*map(_logits, args), **keywords)
        if name in SCALING and _is_number(value):
            factor = float(value) ** SCALING[name]
            if cap is None:
                terms = tuple((x, layer, f * factor) for x, layer, f in terms)
            else:
                cap *= factor
        elif name == "tanh" and cap is None:
            cap = 1.0
        elif name == "__add__" and isinstance(value, Record) and cap is value.cap is None:
            terms += value.terms
        elif name not in CASTS or not isinstance(value, torch.dtype | None):
            return getattr(self.full(), name)(*map(_logits, args))
        out = Record(terms, self.autocast, cap, (*self.ops, (name, args)))
        # none after a forward pass without gradients
        out.requires_grad &= self.requires_grad or getattr(value, "requires_grad", False)
        if name in ("mul_", "div_"):
            self.__dict__ |= vars(out)
        return out

    def full(self) -> Tensor:
        """Compute the logits with the operations and in the dtypes of the model."""
        if self.logits is None:
            hidden, layer, _ = self.terms[0]
            with torch.set_grad_enabled(self.requires_grad), self.precision():
                x = nn.functional.linear(hidden, *_weights(layer, hidden))
                for name, args in self.ops:
                    x = getattr(x, name)(*map(_logits, args))
            self.logits = x
        return self.logits

    def linear(self) -> tuple[Tensor, Tensor, dict[str, Any]] | None:
        """Hidden states, weight and scaling for a linear function; None: use the logits."""
        weights, (hidden, _, scale) = [_weights(y, x) for x, y, _ in self.terms], self.terms[0]
        weight, bias = weights[0]
        if len(weights) > 1:
            hidden, scale = torch.cat([x * f for x, _, f in self.terms], -1), 1.0
            weight = torch.cat([w for w, _ in weights], 1)
        scale *= 1.0 if self.cap is None else self.cap
        plain = len(weights) == 1 or all(b is None for _, b in weights)
        if self.logits is not None or scale <= 0 or (self.cap or 1.0) <= 0 or not plain:
            return None
        return hidden, weight, {"bias": bias, "logit_scale": scale, "softcap": self.cap}

    def precision(self) -> torch.autocast:
        """The autocast of the forward pass."""
        on = self.autocast is not None
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=on)

    def __getattr__(self, name: str) -> Any:
        method = callable(getattr(Tensor, name))
        return functools.partial(self.apply, name) if method else getattr(self.full(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].apply("tanh")
        return func(*tree_map(_logits, args), **tree_map(_logits, kwargs or {}))


for _name in OPERATORS:
    setattr(Record, _name, lambda self, *args, _name=_name: self.apply(_name, *args))


class LazyLogits(Tensor):
    """The logits in a model's output: computed from their record when they are read."""

    record: Record
    versions: list[tuple[Tensor, int]]  # each weight and bias, and its version then

    @staticmethod
    def __new__(cls, record: Record) -> Any:
        """Wrap a record, unless its logits are known."""
        if record.logits is not None:
            return record.logits
        grad = record.requires_grad and torch.is_grad_enabled()
        lazy = Tensor._make_wrapper_subclass(
            cls, record.shape, dtype=record.dtype, device=record.device, requires_grad=grad
        )
        lazy.record, lazy.versions = record, [(x, x._version) for x in record.weights()]
        return lazy

    def read(self) -> Record:
        """The record, whose weights must not have changed since."""
        if self.record.logits is None and any(x._version != v for x, v in self.versions):
            raise RuntimeError("the weights have changed: read .logits before the optimizer's step")
        return self.record

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in (*SCALING, *CASTS) and isinstance(args[0], LazyLogits) and not kwargs:
            out = args[0].read().apply(name, *args[1:])
            return LazyLogits(out) if isinstance(out, Record) else out
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub requires kwargs
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_logits, args), **tree_map(_logits, kwargs or {}))


class Fused(AbstractContextManager["Fused"]):
    """Handle of `fuse`; as a context manager, it restores the model's own loss at the end.

    Attributes:
        reason: why the model keeps its own loss; None if it does not, as far as known.
        lazy: True makes the logits of calls without labels lazy, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lazy = model, False
        self.reason: str | None = None
        self.problem: str | None = "it does not call its LM head"  # until it does

    def keep(self, reason: str) -> Fused:
        """Leave the model's own loss in place, and warn once."""
        if self.reason is None:
            logger.warning("fuse: %s keeps its own loss: %s", type(self.model).__name__, reason)
        self.reason = reason
        return self

    def undo(self) -> None:
        """Restore the model's own loss; a second call is a no-op."""
        for module in self.model.modules():
            own = module.__dict__.get(OWN)
            if own is not None:
                _remove(module)
                if module.forward != own:  # it was not that of the class
                    module.forward = own

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused:
        """A copy of the model has a handle of its own; a copy of its head (PEFT) keeps this one."""
        if id(self.model) not in memo:
            return self
        memo[id(self)] = handle = copy.copy(self)
        handle.model = memo[id(self.model)]
        return handle

    def __exit__(self, *_: object) -> None:
        self.undo()


def fuse(model: nn.Module) -> Fused:
    """Let a causal language model of transformers compute its loss without logits.

    Afterwards `model(input_ids, labels=labels).loss` is the fused loss, with `num_items_in_batch`,
    `shift_labels` and everything else as before. `.logits` is computed when it is read, which must
    be before the weights change. Calls without labels, generation and saving stay as they are.
    Apply it before or after PEFT, DDP, FSDP2 and torch.compile.

    A model that it cannot serve keeps its own loss, with one warning that says why.

    Args:
        model: a model of transformers, possibly inside wrappers.

    Returns:
        A handle with `undo`, which is also a context manager; a second call returns the same one.
    """
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        return Fused(model).keep("it is not a model of transformers")
    parameters = list(inspect.signature(type(inner).forward).parameters)
    handle = inner.__dict__.get(HANDLE) or Fused(inner)
    if "labels" not in parameters or inner.loss_function not in (ForCausalLMLoss, _fused_loss):
        return handle.keep("its loss is not that of transformers' causal language models")
    if not _layers(inner):
        return handle.keep("its LM head is not a linear layer")
    position = parameters.index("labels") - 1  # without self

    @functools.wraps(type(inner).forward)
    def forward(self: PreTrainedModel, *args: Any, **keywords: Any) -> Any:
        own, handle = self.__dict__[OWN], self.__dict__[HANDLE]
        labels = args[position] if len(args) > position else keywords.get("labels")
        if labels is None and not handle.lazy:
            return own(*args, **keywords)
        if not torch.compiler.is_compiling():  # the head, or an adapter, may be new
            _patch_layers(self, handle)
        lazy, handle.lazy = handle.lazy, True
        try:
            out = own(*args, **keywords)
        finally:
            handle.lazy = lazy
        if torch.compiler.is_compiling():
            return out
        if labels is not None and handle.problem:
            handle.keep(handle.problem)
        return tree_map(lambda x: LazyLogits(x) if isinstance(x, Record) else x, out)

    _replace(inner, forward, handle)
    _patch_layers(inner, handle)
    inner.loss_function = _fused_loss
    return handle


def _layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Linear layers inside the LM head whose outputs are logits; with a LoRA adapter, two."""
    head = model.get_output_embeddings()
    linear = [m for m in head.modules() if isinstance(m, nn.Linear)] if head is not None else []
    layers = [m for m in linear if type(m).forward is nn.Linear.forward]
    rows = max([0, *(layer.weight.shape[0] for layer in layers)])
    return [layer for layer in layers if layer.weight.shape[0] == rows]


def _patch_layers(model: PreTrainedModel, handle: Fused) -> None:
    for layer in _layers(model):
        _replace(layer, _head_forward, handle)


def _replace(module: nn.Module, forward: Callable[..., Any], handle: Fused) -> None:
    if module.__dict__.get(OWN, module.forward) == module.forward:  # equal once it is unpickled
        module.__dict__ |= {HANDLE: handle, OWN: module.forward}
        module.forward = types.MethodType(forward, module)
        module.__dict__[REPLICATE] = types.MethodType(_replica, module)


def _remove(module: nn.Module) -> None:
    for name in (HANDLE, OWN, "forward", "_loss_function", REPLICATE):
        module.__dict__.pop(name, None)


@functools.wraps(nn.Module._replicate_for_data_parallel)
def _replica(self: nn.Module) -> nn.Module:
    """A copy for DataParallel; the methods in the copied `__dict__` would run the original."""
    self.__dict__[HANDLE].keep("DataParallel copies it: start one process per GPU with torchrun")
    replica = type(self)._replicate_for_data_parallel(self)
    _remove(replica)
    return replica


@functools.wraps(nn.Linear.forward)  # its name is pickled
def _head_forward(self: nn.Linear, x: Tensor) -> Any:
    handle, kind = self.__dict__[HANDLE], x.device.type
    sharded = isinstance(self.weight, DTensor) or hasattr(self.weight, "ds_id")  # ZeRO-3
    if not handle.lazy or sharded or isinstance(x, Record):
        return self.__dict__[OWN](x)
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    handle.problem = "it computes its loss from the logits"
    return Record(((x, self, 1.0),), autocast)


def _fused_loss(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    shift_labels: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Replacement for `ForCausalLMLoss`."""
    linear = logits.linear() if isinstance(logits, Record) else None
    if linear is None:
        given: Any = (labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        return ForCausalLMLoss(_logits(logits), *given, **keywords)
    hidden, weight, scaling = linear
    handle = logits.terms[0][1].__dict__[HANDLE]
    handle.problem = None
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (-1, 1), value=ignore_index)
    targets = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    if ignore_index != IGNORE:
        targets = targets.masked_fill(targets == ignore_index, IGNORE)
    norm = num_items_in_batch  # None: the number of labels of this call
    norm = norm.to(hidden.device) if isinstance(norm, Tensor) else norm
    with logits.precision():
        scaling |= {"demo_norm": norm, "moments": False, "spec": LABELS}
        return fused_linear_gac_loss(hidden, weight, targets, **scaling).loss


def _is_number(x: Any) -> bool:
    if isinstance(x, Tensor):  # a read from another device would wait for it
        return x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad and bool(x != 0)
    return isinstance(x, int | float) and x != 0


def _logits(x: Any) -> Any:
    """The logits of a record or of lazy logits; anything else unchanged."""
    x = x.read() if isinstance(x, LazyLogits) else x
    return x.full() if isinstance(x, Record) else x


def _weights(layer: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, gathered if FSDP has sharded them again since the head's forward."""
    return _gathered(layer.weight, hidden.dtype), _gathered(layer.bias, hidden.dtype)


def _gathered(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, DTensor):
        return x
    full = x.full_tensor(grad_placements=[Partial()] * x.device_mesh.ndim)
    if full.requires_grad:  # FSDP averages gradients over the ranks
        full.register_hook(lambda grad: grad / x.device_mesh.size())
    return full.to(dtype)
