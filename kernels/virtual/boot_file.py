"""Gives this Python environment a virtual NPU. Written by `python -m npufleet.kernels.virtual enable`;
`python -m npufleet.kernels.virtual disable` removes it and the .pth file beside it.

It only watches for `import torch_npu` (torch imports it by itself), so other programs pay next to nothing.
"""

import sys

# Filled in by `enable`, which copies this file into site-packages.
BUILD = ""
TORCH = ""
TORCH_NPU = ""


class Finder:
    """Wraps the loader of torch_npu; finds nothing itself."""

    busy = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch_npu" or cls.busy:
            return None
        import importlib.util

        cls.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls.busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)  # type: ignore[assignment]  # not imported here: keep start cheap
        return spec


class Loader:
    """Runs the virtual NPU's two halves around the execution of torch_npu."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        try:
            from npufleet.kernels.virtual import boot
        except ImportError as error:
            raise ImportError(
                "this environment has a virtual NPU, but npufleet cannot be imported: "
                f"install it again, or delete {__file__} and npufleet_virtual_npu.pth beside it"
            ) from error
        boot.before_torch_npu(BUILD, TORCH, TORCH_NPU)
        with boot.quiet():
            self._loader.exec_module(module)
        boot.after_torch_npu()


def install():
    """Start to watch imports; called by the .pth file at each start of the interpreter."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
