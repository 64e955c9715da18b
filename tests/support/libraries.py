"""What tables of libraries offer, in training steps: eager, and compiled by default, compared by the tests' judge.

    python -m tests.support.libraries                     goes on where it stopped; results in docs/libraries.json
    python -m tests.support.libraries timm lightly        these libraries alone
    python -m tests.support.libraries --table             writes the table of docs/libraries.md from the results
    python -m tests.support.libraries --one timm/convnext

Needs what it is to walk, none of which is a dependency:

    pip install timm torchvision pytorch_optimizer torch_optimizer schedulefree torch_geometric torchmetrics kornia \
        lightly pytorch-metric-learning

Of families of models the smallest member is taken, in small where its constructor has a setting for it; classes are
made from arguments by name, and called in the first way that eager accepts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import wholestep as ws
from tests.support.equal import Different, assert_same_run, identity
from tests.support.library_worlds import (
    IMAGES,
    LOSSES,
    METRICS,
    STEPS,
    called,
    layer,
    optimizer,
    timm_models,
    torchvision_families,
    torchvision_models,
)
from tests.support.resumable import DOCS, results, walk
from tests.support.worlds import Make

FILE, PAGE, HEADING = DOCS / "libraries.json", DOCS / "libraries.md", "## What their tables offer\n"


def classes(module: str) -> list[str]:
    """The classes that a package names as its own."""
    found = importlib.import_module(module)
    own = {
        n for n, v in vars(found).items() if inspect.isclass(v) and v.__module__.split(".")[0] == module.split(".")[0]
    }
    return sorted(name for name in own if not re.search("Base|Mixin", name))


def listed(module: str, function: str, *args: Any) -> list[str]:
    return sorted(getattr(importlib.import_module(module), function)(*args))


@dataclass(frozen=True)
class Table:
    """What a library offers by name, and the worlds in which one of these is tried, the likeliest to run first."""

    package: str
    what: str
    names: Callable[[], list[str]]
    worlds: Callable[[str], Iterator[tuple[str, Make]]]


def of_optimizers(package: str, module: str, names: Callable[[], list[str]]) -> Table:
    return Table(package, "optimizers", names, functools.partial(optimizer, module))


def of_classes(package: str, module: str, what: str, calls: tuple[Callable[..., Any], ...]) -> Table:
    return Table(package, what, functools.partial(classes, module), functools.partial(called, calls, module))


TABLES = {
    "timm": Table("timm", "families of models", lambda: listed("timm", "list_modules"), timm_models),
    "torchvision": Table("torchvision", "families of models", torchvision_families, torchvision_models),
    "torch_geometric": Table("torch_geometric", "convolutions", lambda: classes("torch_geometric.nn.conv"),
                             functools.partial(layer, "torch_geometric.nn.conv")),
    "torchmetrics": of_classes("torchmetrics", "torchmetrics", "metrics", METRICS),
    "kornia": of_classes("kornia", "kornia.augmentation", "augmentations", IMAGES),
    "lightly": of_classes("lightly", "lightly.loss", "losses", LOSSES),
    "pytorch_metric_learning": of_classes(
        "pytorch-metric-learning", "pytorch_metric_learning.losses", "losses", LOSSES),
    "timm.optim": of_optimizers("timm", "timm.optim", lambda: listed("timm.optim", "list_optimizers")),
    "pytorch_optimizer": of_optimizers(
        "pytorch_optimizer", "pytorch_optimizer", lambda: listed("pytorch_optimizer", "get_supported_optimizers")),
    "torch_optimizer": of_optimizers("torch_optimizer", "torch_optimizer", lambda: classes("torch_optimizer")),
    "schedulefree": of_optimizers("schedulefree", "schedulefree", lambda: classes("schedulefree")),
}  # fmt: skip


INTRODUCTION = f"""
What libraries list by name, each in {STEPS} training steps of its own, by `python -m tests.support.libraries` (which
says what to install): results, parameters, buffers, gradients, optimizer state and generators are compared bit for bit
after each. Left out are those that eager does not run from arguments chosen by name, or not the same way twice.

| library | version | what | offered | run | equal | of these replayed |
|---|---|---|---:|---:|---:|---:|
"""


def judged(case: str) -> dict[str, Any]:
    """How one case fares."""
    library, name = case.split("/", 1)
    last: BaseException | None = None
    worlds = TABLES[library].worlds(name)
    while True:
        try:
            model, make = next(worlds)
            assert_same_run(make, STEPS, identity)
        except StopIteration:
            return {"model": "", "outcome": "eager does not run it so", "why": said(last)}
        except Exception as error:
            last = error
            if isinstance(error, Different) and error.__cause__ is None:
                return {"model": model, "outcome": "eager differs from itself", "why": said(error)}
            if isinstance(error, (LookupError, AttributeError)) and not isinstance(error, KeyError):
                return {"model": "", "outcome": "eager does not run it so", "why": said(error)}
            continue
        break
    try:
        step = assert_same_run(make, STEPS, ws.compile).step
    except Exception as error:
        refused = isinstance(error, ws.errors.CaptureError)
        outcome = "differs" if isinstance(error, Different) else "refused" if refused else "raises"
        return {"model": model, "outcome": outcome, "why": said(error)}
    why = step.breaks[0].splitlines()[0] if step.breaks else ""
    return {"model": model, "outcome": "equal", "way": "co-run" if step.breaks else "replay", "why": why,
            "captures": step.captures}  # fmt: skip


def table() -> str:
    """The results as a table, and those that are neither equal nor left out."""
    known = results(FILE)
    rows, others = [], []
    for key, row in TABLES.items():
        found = {n: r for n, r in known.items() if n.split("/")[0] == key and not r["outcome"].startswith("eager")}
        ways = Counter(r.get("way", r["outcome"]) for r in found.values())
        if found:
            version = importlib.metadata.version(row.package)
            offered = sum(name.split("/")[0] == key for name in known)
            equal = sum(r["outcome"] == "equal" for r in found.values())
            rows.append(
                f"| {row.package} | {version} | {row.what} | {offered} | {len(found)} | {equal} | {ways['replay']} |"
            )
        others += [f"- {n} ({r['model']}): {r['outcome']} {r.get('why', '')}".replace("\n", " ")
                   for n, r in sorted(found.items()) if r["outcome"] != "equal"]  # fmt: skip
    return INTRODUCTION + "\n".join(rows) + "\n\nNot equal:\n\n" + ("\n".join(others) or "none") + "\n"


def said(error: BaseException | None) -> str:
    return re.sub(r"(?<!\w)/\S*/", "", f"{type(error).__name__}: {error}")[:300]  # no paths of this machine


def installed(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        print(f"{library} is not installed: pip install {TABLES[library].package}", file=sys.stderr)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("libraries", nargs="*", default=list(TABLES))
    given = parser.parse_args()
    if given.table:
        PAGE.write_text(PAGE.read_text().split(HEADING)[0] + HEADING + table())
    elif given.one:
        torch.set_num_threads(1)
        print(json.dumps(judged(given.one)))
    else:
        names = [f"{key}/{name}" for key in given.libraries if installed(key) for name in TABLES[key].names()]
        walk(FILE, names, judged)


if __name__ == "__main__":
    main()
