"""Device operations of npufleet: what a layer of a model computes on an Ascend NPU.

Knows torch and torch_npu, nothing above. Callers read :mod:`npufleet.kernels.ops`, never ``torch_npu``.
"""
