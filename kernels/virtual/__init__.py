"""The virtual NPU: ``torch_npu`` on a machine without Ascend hardware.

The real torch-npu wheel runs on stand-ins for the CANN libraries. "Device" memory is host memory, ATen
operations run the CPU kernels over it, ``npu::`` and ``atb::`` operations run
:mod:`npufleet.kernels.reference`, and ``hccl`` moves data between processes. What has no stand-in fails.

It belongs to a Python environment: ``python -m npufleet.kernels.virtual enable`` puts it there,
``disable`` removes it. Importing this package changes nothing and does not import torch.
"""
