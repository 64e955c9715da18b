"""Settings of torch that a step's Python reads are guards; those that it would set are refused, and stay so."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, backends, get_num_threads, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import wholestep as ws
from wholestep.capture.outside.torch_settings import GETTERS, SETTERS
from wholestep.errors import DataDependentError, UnsupportedError

THREADS = 1  # as the tests have it (conftest.py)
EINSUM = backends.opt_einsum.enabled


@pytest.fixture(autouse=True)
def flags_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they may be until somebody imports torch's own test utilities, which other tests do."""
    monkeypatch.setitem(backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)


def attribute(holder: Any, name: str, new: Any) -> tuple[Callable[[], Any], ...]:
    old = getattr(holder, name)
    return lambda: getattr(holder, name), lambda: setattr(holder, name, new), lambda: setattr(holder, name, old)


ABOVE, LOGGER = logging.getLogger("wholestep"), logging.getLogger("wholestep.tests")
PROFILER = torch.autograd.profiler.profile()
# How to read a setting, to change it, and to change it back.
READ: dict[str, tuple[Callable[[], Any], ...]] = {
    "torch.get_num_threads()": (
        torch.get_num_threads, lambda: torch.set_num_threads(THREADS + 1), lambda: torch.set_num_threads(THREADS)),
    "get_num_threads()": (
        lambda: get_num_threads(), lambda: torch.set_num_threads(THREADS + 1), lambda: torch.set_num_threads(THREADS)),
    "float32_matmul_precision()": (
        torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest")),
    "mkldnn.enabled": attribute(backends.mkldnn, "enabled", False),
    "cudnn.benchmark": attribute(backends.cudnn, "benchmark", True),
    "cudnn.deterministic": attribute(backends.cudnn, "deterministic", True),
    "fill_uninitialized_memory()": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "is_anomaly_enabled()": (
        torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False)),
    "warnAlways()": (
        torch.is_warn_always_enabled, lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False)),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn"),
        lambda: torch.set_deterministic_debug_mode("default")),
    "kernels of attention": (
        backends.cuda.flash_sdp_enabled, lambda: backends.cuda.enable_flash_sdp(False),
        lambda: backends.cuda.enable_flash_sdp(True)),
    "flags that torch keeps in Python": (
        lambda: backends.opt_einsum.enabled, lambda: setattr(backends.opt_einsum, "enabled", not EINSUM),
        lambda: vars(backends.opt_einsum).pop("enabled")),
    "get_swap_module_params_on_conversion": (
        torch.__future__.get_swap_module_params_on_conversion,
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        lambda: torch.__future__.set_swap_module_params_on_conversion(False)),
    "check_sparse_tensor_invariants()": (
        torch.sparse.check_sparse_tensor_invariants.is_enabled, torch.sparse.check_sparse_tensor_invariants.enable,
        torch.sparse.check_sparse_tensor_invariants.disable),
    "get_fastpath_enabled()": (
        backends.mha.get_fastpath_enabled, lambda: backends.mha.set_fastpath_enabled(False),
        lambda: backends.mha.set_fastpath_enabled(True)),
    "get_sharing_strategy()": (
        torch.multiprocessing.get_sharing_strategy, lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
        lambda: torch.multiprocessing.set_sharing_strategy("file_descriptor")),
    "is_multithreading_enabled()": (
        torch._C._is_multithreading_enabled, lambda: torch._C._set_multithreading_enabled(False),
        lambda: torch._C._set_multithreading_enabled(True)),
    "get_graph_executor_optimize()": (
        torch._C._get_graph_executor_optimize, lambda: torch._C._set_graph_executor_optimize(False),
        lambda: torch._C._set_graph_executor_optimize(True)),
    "torch._tensor_str.PRINT_OPTS.precision": (
        lambda: torch._tensor_str.PRINT_OPTS.precision, lambda: torch.set_printoptions(precision=7),
        lambda: torch.set_printoptions(profile="default")),
    "allow_bf16_reduced_precision_reduction()": attribute(
        backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "denormal numbers": (
        lambda: (torch.full((1,), 1e-40) * 1).item() != 0, lambda: torch.set_flush_denormal(True),
        lambda: torch.set_flush_denormal(False)),
    "sys.modules": (
        lambda: "wholestep_tests_none" in sys.modules,
        lambda: sys.modules.update(wholestep_tests_none=ModuleType("wholestep_tests_none")),
        lambda: sys.modules.pop("wholestep_tests_none")),
    "warnings.filters": (
        lambda: len(warnings.filters), lambda: warnings.filters.append(("ignore", None, Warning, None, 7)),  # type: ignore
        lambda: warnings.filters.pop()),  # type: ignore[attr-defined]
    "levels of the logger 'wholestep.tests'": (
        lambda: LOGGER.isEnabledFor(logging.DEBUG), lambda: ABOVE.setLevel(logging.DEBUG),
        lambda: ABOVE.setLevel(logging.NOTSET)),
    "levels of the logger 'wholestep'": (
        lambda: logging.getLogger("wholestep").level, lambda: ABOVE.setLevel(logging.DEBUG),
        lambda: ABOVE.setLevel(logging.NOTSET)),
    "G['LOGGER'].disabled": (lambda: LOGGER.disabled, *attribute(LOGGER, "disabled", True)[1:]),
    "torch.jit._state._enabled.enabled": (
        lambda: torch.jit._state._enabled.enabled, *attribute(torch.jit._state._enabled, "enabled", False)[1:]),
    "sys.argv": (lambda: len(sys.argv), lambda: sys.argv.append("more"), lambda: sys.argv.pop()),
    "profiler_enabled()": (
        lambda: torch.autograd._profiler_enabled(), lambda: PROFILER.__enter__(),
        lambda: PROFILER.__exit__(None, None, None)),
}  # fmt: skip


def test_a_warning_that_has_become_an_error() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("mind", stacklevel=1)
        return x * 2

    compiled = ws.compile(step, fullgraph=True)
    for action, captures in (("ignore", 1), ("ignore", 1), ("error", 1), ("default", 2), ("ignore", 2)):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            with pytest.raises(UserWarning, match="mind") if action == "error" else nullcontext():
                compiled(torch.ones(2))
        assert compiled.captures == captures


def test_a_kernel_in_the_place_of_another_one() -> None:
    library = torch.library.Library("wholestep_tests_kernels", "FRAGMENT")
    library.define("scaled(Tensor x) -> Tensor")
    scaled = torch.ops.wholestep_tests_kernels.scaled
    compiled = ws.compile(lambda x: scaled(x) + 1, fullgraph=True)
    for factor in (2.0, 2.0, 3.0):
        if not compiled.captures or factor == 3.0:
            library.impl("scaled", lambda x, factor=factor: x * factor, allow_override=True)
        assert compiled(torch.ones(2)).tolist() == [factor + 1] * 2
    (reason,) = compiled.recompiles
    assert "kernels replaced in Python: expected" in reason


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_settings_is_a_guard(name: str) -> None:
    read, change, back = READ[name]
    torch.manual_seed(5)

    def step(x: Tensor) -> Any:
        value = read()
        return x * (len(value) if isinstance(value, str) else bool(value) if value is None else value), value

    def same() -> bool:
        x = torch.ones(2, dtype=torch.double)
        (got, value), (want, wanted) = compiled(x), step(x)
        return value == wanted and torch.equal(got, want)

    compiled = ws.compile(step, fullgraph=True)
    assert same() and same() and compiled.captures == 1
    before = read()
    change()
    try:
        assert read() != before and same() and compiled.captures == 2
    finally:
        back()
    assert same() and compiled.captures == 2 and len(compiled.recompiles) == 1 and name in compiled.recompiles[0]


def test_parametrized_tensors_are_made_once_where_they_are_cached() -> None:
    def statistics(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        model = ws.compile(net) if compiles else net
        for around in (nullcontext, nn.utils.parametrize.cached, nullcontext):
            with around():
                _ = model(torch.ones(2, 3)), model(torch.ones(2, 3))
        return list(net.buffers())

    assert all(map(torch.equal, statistics(True), statistics(False)))


def flags() -> None:
    with backends.mkldnn.flags(enabled=False):
        pass


def anomaly() -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        pass


SET: dict[str, Callable[[], Any]] = {
    "set_num_threads": lambda: torch.set_num_threads(THREADS + 1),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "set_mkldnn_enabled": flags,
    "a property of torch.backends.mkldnn": lambda: setattr(backends.mkldnn, "enabled", False),
    "set_anomaly_enabled": anomaly,
    "set_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
    "set_warnAlways": lambda: torch.set_warn_always(True),
    "set_flush_denormal": lambda: torch.set_flush_denormal(True),
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_a_step_would_set_is_refused(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        SET[name]()
        return x + 1

    before = [read() for read, *_ in READ.values()]
    with pytest.raises(UnsupportedError, match=f"the step .*{name}.*, which a replay would not") as caught:
        ws.compile(step, fullgraph=True)(torch.ones(2))
    assert f"{__file__}:" in str(caught.value) and "set it outside of the step" in str(caught.value)
    assert [read() for read, *_ in READ.values()] == before


def test_what_is_set_to_what_it_is() -> None:
    def step(x: Tensor) -> Tensor:
        torch.set_num_threads(torch.get_num_threads())
        with backends.mkldnn.flags(enabled=backends.mkldnn.enabled):
            return x + 1

    assert torch.equal(ws.compile(step, fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))


def test_steps_that_read_no_setting_are_not_guarded_by_any() -> None:
    compiled = ws.compile(lambda x: nn.functional.relu(x) + 1, fullgraph=True)
    compiled(torch.ones(2))
    torch.set_num_threads(THREADS + 1)
    torch.manual_seed(7)
    try:
        compiled(torch.ones(2))
        assert compiled.captures == 1
    finally:
        torch.set_num_threads(THREADS)


def test_other_threads_set_what_they_like() -> None:
    done = threading.Event()

    def works() -> None:
        while not done.is_set():
            torch.set_warn_always(not torch.is_warn_always_enabled())

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(works)
        for _ in range(3):
            assert ws.compile(lambda x: x * 2, fullgraph=True)(torch.ones(1)) == 2
        done.set()
        running.result()
    torch.set_warn_always(False)


def test_settings_are_told_by_their_names() -> None:
    names = {getter.__name__ for getter in GETTERS}
    assert {"get_num_threads", "_get_cudnn_benchmark", "_get_mkldnn_enabled", "is_anomaly_enabled"} <= names
    assert not names & {"is_grad_enabled", "is_autocast_enabled", "get_default_dtype", "_is_torch_function_enabled"}
    assert {"set_num_threads", "_set_mkldnn_enabled", "_set_fp32_precision_setter"} <= SETTERS.keys()
    assert {"_set_default_dtype", "_set_default_tensor_type"} <= SETTERS.keys()
    assert not SETTERS.keys() & {"_set_grad_enabled", "set_autocast_enabled"}


def test_the_stack_of_function_modes_is_asked_in_python() -> None:
    def step(x: Tensor) -> Tensor:
        return x + len(torch.overrides._get_current_function_mode_stack())

    compiled = ws.compile(step)
    for x in map(torch.tensor, (1.0, 2.0, 3.0)):
        with nullcontext() if x == 1 else torch.device("cpu"):
            assert compiled(x) == step(x)
    with pytest.raises(DataDependentError, match="_get_current_function_mode_stack"):
        ws.compile(step, fullgraph=True)(torch.ones(()))


def test_lines_that_are_switched_off_are_logged_when_they_are_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        LOGGER.debug("a step")
        return x + 1

    compiled = ws.compile(step)
    compiled(torch.ones(1))
    with caplog.at_level(logging.DEBUG, "wholestep"):
        assert compiled(torch.ones(1)) == 2 and caplog.messages == ["a step"]
    assert compiled.captures == 1


ASKING = {"threads": lambda: torch.set_num_threads(THREADS + 1), "time": time.time, "seed": torch.seed}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_a_refusal_that_the_step_lets_pass_ends_the_capture(ask: Callable[[], Any]) -> None:
    def step(x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            (time.time if ask is time.time else ask)()
        return x + 1

    with pytest.raises((UnsupportedError, DataDependentError), match="replay|Generator.seed"):
        ws.compile(step, fullgraph=True)(torch.ones(2))


def test_functions_by_which_one_setting_is_known_stay_their_modules() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        return x + float(torch._C._is_multithreading_enabled()) + swaps

    asked = torch._C._is_multithreading_enabled
    served, strict = ws.compile(step), ws.compile(step, fullgraph=True)
    before = torch._C._is_multithreading_enabled()
    try:
        for enabled in (True, False, True):
            torch._C._set_multithreading_enabled(enabled)
            for compiled in (served, strict):
                assert compiled(torch.ones(())) == step(torch.ones(()))
            assert asked is torch._C._is_multithreading_enabled
    finally:
        torch._C._set_multithreading_enabled(before)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.relu else result


class Lists(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.relu.default else result


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [Doubles, Lists, lambda: FlopCounterMode(display=False)])
def test_modes_around_a_step_see_what_eager_calls(kind: Callable[[], Any], captured: bool) -> None:
    weight = torch.randn(3, 3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        nn.functional.relu(x @ weight).sum().backward()
        assert weight.grad is not None
        return weight.grad

    x, found = torch.randn(4, 3), []
    for run in (step, ws.compile(step, fullgraph=True)):
        if captured:
            run(x)
        with kind() as mode:
            found.append((run(x), getattr(mode, "seen", None) or getattr(mode, "flop_counts", None)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_a_function_that_somebody_has_put_in_the_place_of_torchs_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.get_num_threads()

    ws.compile(step, fullgraph=True)(torch.ones(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setitem(sys.modules, "loaded_since", ModuleType("loaded_since"))
    assert torch.equal(ws.compile(step, fullgraph=True)(torch.ones(2)), torch.full((2,), 3.0))
