"""Device operations as typed functions, the only code that calls ``torch_npu``.

One module per family: norm, rope, activation, kv_cache, attention, sampling. Whether a fused operator or a
composition computes an operation is decided here, once, by what the operator can do.
"""
