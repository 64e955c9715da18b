"""Names of backends, who makes their groups, and which one serves which kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

from wholestep.comm.engines import c10d
from wholestep.comm.engines.hierarchical import create_shared
from wholestep.comm.engines.threads import NullGroup, ThreadGroup
from wholestep.comm.process_group import ProcessGroup
from wholestep.comm.stores.store import Store

Creator = Callable[[Store, int, int, timedelta], ProcessGroup]


_ENGINES = ["gloo", "nccl", "mpi", "ucc"]  # of torch.distributed
_BUILT_IN = ["shm", "thread", "null", *_ENGINES]


class _Plugin(NamedTuple):
    creator_fn: Creator
    devices: Sequence[str] = ("cpu", "cuda")


class Backend(str):
    """A backend's name, in lower case: ``Backend("Gloo") == "gloo"``.

    Raises:
        ValueError: no backend of that name is known.
    """

    UNDEFINED = "undefined"
    SHM, THREAD, NULL, GLOO, NCCL, MPI, UCC = _BUILT_IN
    backend_list: ClassVar[list[str]] = [UNDEFINED, *_BUILT_IN]
    _plugins: ClassVar[dict[str, _Plugin]] = {
        "SHM": _Plugin(create_shared, ["cpu"]),
        "THREAD": _Plugin(ThreadGroup),
        "NULL": _Plugin(NullGroup),
        **{name.upper(): _Plugin(partial(c10d.C10dGroup, name)) for name in _ENGINES},
        "NCCL": _Plugin(partial(c10d.C10dGroup, "nccl"), ["cuda"]),
    }

    def __new__(cls, name: str) -> Self:
        if not isinstance(name, str):
            raise TypeError(f"a backend is a string, found {name!r}")
        if name.upper() not in cls._plugins:
            known = ", ".join(plugin.lower() for plugin in cls._plugins)
            raise ValueError(f"unknown backend {name!r}: known are {known}; others by Backend.register_backend")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(cls, name: str, func: Creator, devices: str | list[str] | None = None) -> None:
        """Adds a backend: ``func(store, rank, size, timeout)`` makes a `ProcessGroup`.

        Args:
            devices: kinds of device that it serves (default: cpu and cuda).

        Raises:
            ValueError: the name is that of a built-in backend.
        """
        if name.lower() in ("undefined", *_BUILT_IN):
            raise ValueError(f"register_backend: {name!r} is built in")
        setattr(cls, name.upper(), name.lower())
        if name.lower() not in cls.backend_list:
            cls.backend_list.append(name.lower())
        served = [devices] if isinstance(devices, str) else devices or ["cpu", "cuda"]
        cls._plugins[name.upper()] = _Plugin(func, served)


class BackendConfig:
    """Which backend serves which device: ``"gloo"``, ``"cpu:shm,cuda:nccl"``.

    Raises:
        ValueError: an unknown backend, a device named twice, or an entry that is not ``device:backend``.
    """

    def __init__(self, backend: str) -> None:
        self.device_backend_map: dict[str, Backend] = {}
        if ":" not in backend:
            whole = Backend(backend)
            for device in Backend._plugins[whole.upper()].devices:
                self.device_backend_map[device] = whole
            return
        for entry in backend.lower().split(","):
            device, colon, name = entry.partition(":")
            if not (device and colon and name):
                raise ValueError(f"backend {backend!r}: {entry!r} is not of the form device:backend")
            if device in self.device_backend_map:
                raise ValueError(f"backend {backend!r}: device {device!r} is named twice")
            self.device_backend_map[device] = Backend(name)

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())


def is_gloo_available() -> bool:
    """True where the installed torch was built with Gloo."""
    return c10d.has_engine("gloo")


def is_nccl_available() -> bool:
    """True where the installed torch was built with NCCL."""
    return c10d.has_engine("nccl")


def is_mpi_available() -> bool:
    """True where the installed torch was built with MPI."""
    return c10d.has_engine("mpi")


def is_ucc_available() -> bool:
    """True where the installed torch was built with UCC."""
    return c10d.has_engine("ucc")


def is_shm_available() -> bool:
    """True: the engine is compiled with the package."""
    return True


def is_backend_available(backend: str) -> bool:
    """True when groups of that backend can be made here."""
    name = backend.lower()
    return c10d.has_engine(name) if name in _ENGINES else name.upper() in Backend._plugins


class DeviceGroup(ProcessGroup):
    """One group with a backend for each kind of device; a collective goes where its tensors are."""

    def __init__(self, name: str, parts: dict[str, ProcessGroup]) -> None:
        first = next(iter(parts.values()))
        super().__init__(first.rank(), first.size())
        self.backend_name, self.parts, self.timeout = name, parts, first.timeout

    @property
    def sequence(self) -> int:  # type: ignore[override]
        return sum(part.sequence for part in set(self.parts.values()))

    def for_device(self, kind: str) -> ProcessGroup:
        """The backend for tensors on ``kind``.

        Raises:
            ValueError: no backend serves that device.
        """
        if kind not in self.parts:
            raise ValueError(
                f"group {self.group_name!r} has no backend for {kind} tensors: its backends are {self.name()}"
            )
        return self.parts[kind]

    def barrier(self, opts: Any = None) -> Any:
        return next(iter(self.parts.values())).barrier(opts)

    def name_parts(self, name: str, labels: Sequence[int]) -> None:
        super().name_parts(name, labels)
        for part in set(self.parts.values()):
            part.name_parts(name, labels)

    def abort(self, reason: str) -> None:
        for part in set(self.parts.values()):
            part.abort(reason)

    def shutdown(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for part in set(self.parts.values()):
                all_of_them.callback(part.shutdown)


def create_group(config: BackendConfig, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A group by the config; a `DeviceGroup` when several backends share the work."""
    makers = dict.fromkeys(config.device_backend_map.values())
    made = {name: Backend._plugins[name.upper()].creator_fn(store, rank, size, timeout) for name in makers}
    for group in made.values():
        group.timeout = timeout
    if len(made) == 1:
        return next(iter(made.values()))
    return DeviceGroup(str(config), {device: made[name] for device, name in config.device_backend_map.items()})
