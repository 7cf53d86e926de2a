"""What code under test changes in its process outside of itself.

A package may define and register what is its own. It has no business replacing functions of
others, above all not those of the tools that test it.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import types
import warnings

# Whoever replaces something of these while tests run decides what they say.
TOOLS = (
    "_pytest.",
    "pytest.",
    "pluggy.",
    "unittest.",
    "builtins.",
    "gate_harness.",
    "gate_effects.",
    "torch.testing.",
    "torch.Tensor.",
    "torch.equal",
    "torch.allclose",
    "torch.isfinite",
    "torch.isnan",
)
_CODE = " (its code)"
_REPLACED_TOOLS = tuple(f"replaced {tool}" for tool in TOOLS)
_KINDS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    property,
    classmethod,
    staticmethod,
)


def preload(names):
    """Import what the package requires, so that its effects are not taken for the package's."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def functions(package):
    """Every function, class and method outside of ``package``, by where it is found."""
    held = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            _hold(held, f"{name}.{key}", value)
            if issubclass(type(value), type) and value.__module__ == name:
                for part, method in list(vars(value).items()):
                    _hold(held, f"{name}.{key}.{part}", method)
    return held


def _hold(held, where, value):
    kind = type(value)
    if kind in _KINDS or issubclass(kind, type):
        held[where] = value
    if kind is types.FunctionType:
        held[where + _CODE] = value.__code__


def settings(plugins):
    """The process-wide settings that importing a module should leave alone, by their names."""
    found = {
        "the working directory": os.getcwd(),
        "the import path": list(sys.path),
        "the finders of imports": [*map(id, sys.meta_path), *map(id, sys.path_hooks)],
        "the standard streams": [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
        "the trace function": (sys.gettrace(), sys.getprofile()),
        "the recursion limit": sys.getrecursionlimit(),
        "the umask": _umask(),
        "the filters of warnings": _silences_all(),
        "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
        "pytest's plugins": sorted(map(str, plugins)),
    }
    found |= {f"the environment variable {name}": text for name, text in os.environ.items()}
    for number in signal.valid_signals():
        name = getattr(number, "name", str(number))
        found[f"what happens at {name}"] = signal.getsignal(number)
    return found | _torch_settings()


def _silences_all():
    # Others filter what they themselves cause; that comes and goes as their modules are imported.
    return any(
        action == "ignore" and category is Warning and message is None and module is None
        for action, message, category, module, _line in warnings.filters
    )


def _umask():
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _torch_settings():
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "torch's float32 precision": torch.get_float32_matmul_precision(),
    }


class Watch:
    """Remembers the process as it is now; tells later what was changed since.

    Args:
        package: whose own modules are left out.
        plugins: a call that returns the names of pytest's plugins.
    """

    def __init__(self, package, plugins):
        self._package, self._plugins = package, plugins
        self._functions = functions(package)
        self._settings = settings(plugins())
        self._threads = threads()

    def effects(self):
        """Return what has changed, one phrase each."""
        return [
            *self._changed(settings(self._plugins())),
            *self._replaced(),
            *(f"started the thread {name}" for name in sorted(threads() - self._threads)),
        ]

    def tampering(self):
        """Return which functions of test tools were replaced, one phrase each."""
        return [what for what in self._replaced() if what.startswith(_REPLACED_TOOLS)]

    def _replaced(self):
        now = functions(self._package)
        gone = [where for where, value in self._functions.items() if now.get(where) is not value]
        # A function that is another one has other code as well.
        code = {f"{where}{_CODE}" for where in gone}
        added = [where for where in now.keys() - self._functions if self._overrides(where)]
        return [f"replaced {where}" for where in sorted([*gone, *added]) if where not in code]

    def _overrides(self, where):
        """Whether something new hides what a class inherited."""
        owner, _, name = where.rpartition(".")
        kind = self._functions.get(owner)
        bases = kind.__mro__[1:] if isinstance(kind, type) else ()
        return any(name in vars(base) for base in bases)

    def _changed(self, now):
        names = sorted(self._settings.keys() | now.keys())
        return [f"changed {n}" for n in names if self._settings.get(n) != now.get(n)]


def threads():
    """Names of the running threads."""
    return {thread.name for thread in threading.enumerate()}
