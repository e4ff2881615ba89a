"""Null mode: floating-point operations give shapes and no numbers; indices and copies stay right."""

from .process import report

CODE = """
import json, torch, torch_npu
from npufleet.kernels.virtual import counters
x = torch.randn(4, 8).npu()
w = torch.randn(8, 16).npu()
g = torch.ones(8).npu()
filled = torch.zeros(2).npu()
filled.add_(5.0)
out = {
    "shapes": [list(t.shape) for t in (
        x @ w, torch.nn.functional.linear(x, w.t()), torch.softmax(x, -1), torch.cat([x, x]),
        x.view(2, 16), x[:2],
        *torch_npu.npu_rms_norm(x, g), *torch_npu.npu_add_rms_norm(x, x, g), torch_npu.npu_swiglu(x),
        torch.nn.functional.embedding(torch.arange(5).npu(), w), *x.topk(3), x.sum(0), x + x[0], x > 0)],
    "dtypes": [str(t.dtype) for t in (x + 1, x > 0, x.argmax(-1), (x.half() @ w.half()))],
    "integers": (torch.arange(4, device="npu") * 2 + 1).tolist(),
    "index": torch.arange(10, device="npu")[torch.tensor([7, 3]).npu()].tolist(),
    "argmax": (x @ w).argmax(-1).tolist(),
    "copied": torch.arange(3.0).npu().cpu().tolist(),
    "filled": filled.tolist(),
}
graph, held = torch.npu.NPUGraph(), []
with torch.npu.graph(graph):
    held.append((x @ w, torch.arange(3, device="npu") + 1))
graph.replay()
out["graph"] = [list(held[0][0].shape), held[0][1].tolist()]
counters.reset()
x @ w
(x + 1).sum().item()
torch.npu.synchronize()
counted = counters.read()
out["ops"], out["syncs"], out["calls"] = counted.ops, counted.syncs, counted.calls
print(json.dumps(out))
"""


def test_null_mode():
    seen = report(CODE, NPUFLEET_DEVICE="virtual:1,null")
    assert seen["shapes"] == [
        [4, 16], [4, 16], [4, 8], [8, 8], [2, 16], [2, 8],
        [4, 8], [4, 1], [4, 8], [4, 1], [4, 8], [4, 4],
        [5, 16], [4, 3], [4, 3], [8], [4, 8], [4, 8],
    ]  # fmt: skip
    assert seen["dtypes"] == ["torch.float32", "torch.bool", "torch.int64", "torch.float16"]
    assert seen["integers"] == [1, 3, 5, 7]
    assert seen["index"] == [7, 3]
    assert seen["argmax"] == [0] * 4
    assert seen["copied"] == [0, 1, 2]
    assert seen["filled"] == [0, 0]  # the addition did nothing
    assert seen["graph"] == [[4, 16], [1, 2, 3]]
    assert seen["ops"]["aten::matmul"] == 1
    assert seen["calls"] == sum(seen["ops"].values())
    assert seen["syncs"]["copy_to_host"] == 1
    assert seen["syncs"]["device"] == 1
