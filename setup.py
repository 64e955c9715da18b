"""The compiled parts of the package: shared-memory engine, chains, random draws, guards in bulk, places of
tensors, watched methods.

All else is in pyproject.toml.
"""

from setuptools import Extension, setup

SOURCES = [
    "module",
    "segment",
    "round",
    "compare",
    "reduce",
    "move",
    "allreduce_exchange",
    "allreduce_split",
    "work",
    "progress",
    "p2p",
    "p2p_wait",
    "slots",
    "cached_call",
    "plans",
    "flight",
]

setup(
    ext_modules=[
        Extension(
            "wholestep.comm.engines._native",
            [f"wholestep/comm/engines/native/{name}.c" for name in SOURCES],
            depends=[f"wholestep/comm/engines/native/{name}.h" for name in ("shm", "p2p", "python")],
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-math-errno", "-ffp-contract=off", "-pthread",
                                "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],  # fmt: skip
            py_limited_api=True,
        ),
        Extension(
            "wholestep.lower.fusion._chain",
            ["wholestep/lower/fusion/native/chain.c", "wholestep/lower/fusion/native/straight.c"],
            depends=["wholestep/lower/fusion/native/chain.h", "wholestep/lower/fusion/native/clones.h"],
            # no product is fused with a sum unless the code says so: the bits are torch's
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-fno-math-errno", "-ffp-contract=off",
                                "-fno-trapping-math", "-pthread", "-Wall", "-Wextra"],
            extra_link_args=["-pthread", "-lm"],
            py_limited_api=True,
        ),
        Extension(
            "wholestep.lower.fusion._draws",
            ["wholestep/lower/fusion/native/draws.c"],
            depends=["wholestep/lower/fusion/native/clones.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-fwrapv", "-Wall", "-Wextra"],
            extra_link_args=["-lm"],
            py_limited_api=True,
        ),
        Extension(
            "wholestep.capture.guards._bulk",
            ["wholestep/capture/guards/native/bulk.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
            py_limited_api=True,
        ),
        Extension(
            "wholestep.co_run._places",
            ["wholestep/co_run/native/places.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
            py_limited_api=True,
        ),
        Extension(
            "wholestep.capture.outside._methods",
            ["wholestep/capture/outside/native/methods.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra"],
            py_limited_api=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
