"""Records one forward pass of any model that runs: every torch function, every module call.

Functions are intercepted with a `TorchFunctionMode`, module calls by wrapping `nn.Module.__call__` while the
pass runs. Below both, a `TorchDispatchMode` sees every operator. One that no recorded call explains (compiled
extensions, interception switched off) becomes a step "unseen" that takes its tensors; its result is unknown.
A tensor that a call uses without having been given it counts among the call's inputs.

What cannot be seen: memory shared with NumPy or DLPack before the pass and written in it; work in other
threads (named in `not_seen`); the way of a number taken out of a tensor (`item` is its consumer). A norm that
runs in something recorded as a whole has no step of its own (named likewise). Not for timing, nor for
training: it runs under `no_grad`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normalcy.flow.norms import is_norm
from normalcy.flow.records import Flow, Held, Step, Value
from normalcy.flow.structure import deep_tensors_in
from normalcy.flow.tape import Tape, without_interception
from normalcy.flow.unseen import never_reached, special

_ONE_AT_A_TIME = threading.RLock()


def record(model: nn.Module, run: Callable[[], object]) -> Flow:
    """Run `run()` once under `no_grad` and record what it does with the tensors of `model`.

    Normalization layers are recorded as one step each, and so are scripted modules. Training or evaluation
    mode is as the caller set it; buffers change as they do in any forward pass. What `run` raises is passed
    on, and nothing is left on the model or on PyTorch.

    Args:
        model: any module.
        run: calls the model, usually `lambda: model(x)`.

    Returns:
        The record; it keeps no tensor alive.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
        >>> flow = record(model, lambda: model(torch.randn(2, 3, 5, 5)))
        >>> [(step.op, step.module) for step in flow.steps if step.op != "randn"]
        [('conv2d', '0'), ('module', '1'), ('relu', '2')]
        >>> conv = flow.steps_of("0")[0]
        >>> flow.consumers(conv.outputs[0])[0].module
        '1'
    """
    with _ONE_AT_A_TIME:
        return _Recording(model).of(run)


class _Functions(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._tape.function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler: seconds, and nothing is compiled here

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_interception():
            return self._tape.operator(func, args, kwargs or {})


class _Recording:
    """One recording: what is wrapped, in which module we are, what went in and what came out."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())  # held, so that an `id` stays theirs
        self._paths: dict[str, str] = {}
        self._path_of: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths[path] = self._path_of.setdefault(id(module), path)
        self._calls = dict.fromkeys(self._path_of.values(), 0)
        self._tape = Tape(Held(model))
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._depth = 0
        self._thread = threading.get_ident()

    def of(self, run: Callable[[], object]) -> Flow:
        with contextlib.ExitStack() as stack:
            if (
                "torch._dynamo" in sys.modules
            ):  # else nothing can be compiled, and importing it takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._wrapped_leaves())
            stack.enter_context(self._wrapped_calls())
            stack.enter_context(_Operators(self._tape))
            stack.enter_context(_Functions(self._tape))
            result = run()
        self._out(result)
        del result
        for item in special(self._model, self._paths, self._calls):
            self._tape.note(item.where, item.why)
        used: dict[str, Step] = {}
        for step in self._tape.steps:
            for name in step.parameters:
                used.setdefault(name, step)
        for item in never_reached(self._model, self._calls, used, self._path_of):
            self._tape.note(item.where, item.why)
        return Flow(
            steps=self._tape.steps,
            inputs=self._inputs,
            outputs=self._outputs,
            not_seen=tuple(self._tape.notes),
            escaped=self._escaped(),
            paths=self._paths,
            calls=self._calls,
            held=self._tape.held,
        )

    def _out(self, result: object) -> None:
        with without_interception():
            for tensor in deep_tensors_in(result):
                value = self._tape.ledger(tensor)
                if all(value is not other for other in self._outputs):
                    self._outputs.append(value)

    def _escaped(self) -> list[Value]:
        """Values of steps whose tensor somebody still holds, although it was not returned."""
        returned = set(self._outputs)

        def held() -> list[Value]:
            alive = (value for value in self._tape.ledger.alive() if value.origin == "step")
            return [value for value in alive if value not in returned]

        if held():
            gc.collect()  # a tensor in a dead cycle is not held by anybody
        return held()

    @contextlib.contextmanager
    def _wrapped_leaves(self) -> Iterator[None]:
        """Replace `forward` on each norm, so that its step lies between the user's hooks."""
        leaves = [module for module in self._modules if is_norm(module)]
        before = [module.__dict__.get("forward") for module in leaves]
        try:
            for module, own in zip(leaves, before, strict=True):
                module.__dict__["forward"] = self._leaf(module, own)
            yield
        finally:
            for module, own in zip(leaves, before, strict=True):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own

    def _leaf(self, module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
        path = self._path_of[id(module)]

        run = own or type(module).forward.__get__(module)

        @functools.wraps(run)  # whoever looks at what it takes sees the layer's own arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return run(*args, **kwargs)
            tape = self._tape
            self._calls[path] += 1
            if tape.inside:
                if tape.inside_of != "module":
                    tape.note(path, f"it ran inside {tape.inside_of}, which is recorded as a whole")
                return run(*args, **kwargs)
            tape.path.append(path)
            try:
                return tape.call("module", run, args, kwargs, leaf=module)
            finally:
                tape.path.pop()

        return forward

    @contextlib.contextmanager
    def _wrapped_calls(self) -> Iterator[None]:
        """Wrap the call of every module, in this thread."""
        before = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._path_of.get(id(module))
            if threading.get_ident() != self._thread:
                if path is not None:
                    self._calls[path] += 1
                    self._tape.note(path, "it was called in another thread, where nothing is recorded")
                return before(module, *args, **kwargs)
            if path is None:
                if is_norm(module):
                    self._tape.note(
                        self._tape.path[-1],
                        f"it calls a {type(module).__name__} that is not registered in the model",
                    )
                return before(module, *args, **kwargs)
            return self._module(before, module, path, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = before  # type: ignore[method-assign]

    def _module(
        self,
        run: Callable[..., Any],
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tape = self._tape
        if not is_norm(module):  # norms are counted where their forward runs
            self._calls[path] += 1
        root = module is self._model and not self._depth
        if root:
            self._depth += 1
            self._given(args, kwargs)
        tape.path.append(path)
        try:
            if isinstance(module, torch.jit.ScriptModule) and not tape.inside:
                result = tape.call("module", lambda *a, **k: run(module, *a, **k), args, kwargs, leaf=module)
            else:
                result = run(module, *args, **kwargs)
        finally:
            tape.path.pop()
            self._depth -= root
        if root:
            self._out(result)
        return result

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with without_interception():
            for tensor in deep_tensors_in((args, kwargs)):
                value = self._tape.ledger.given(tensor)
                if all(value is not other for other in self._inputs):
                    self._inputs.append(value)
