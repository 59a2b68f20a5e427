"""The least time of a GPU's kernels, from HLO as XLA's GPU compiler writes it."""

import pytest

from tpuswarm.plan.compile.kernels import least_time

RATES = {"bf16": 1e12, "f32": 5e10}
BYTES_PER_S = 1e9
MIB = 2**20

HEAD = """HloModule jit_traced, is_scheduled=true

%fused_slice (param_0: f32[8,512,512], param_1: s32[]) -> f32[512,512] {
  %param_0 = f32[8,512,512]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %constant.1 = s32[] constant(0)
  %dynamic-slice.1 = f32[1,512,512]{2,1,0} dynamic-slice(%param_0, %param_1, %constant.1, %constant.1)
  %bitcast.1 = f32[512,512]{1,0} bitcast(%dynamic-slice.1)
  ROOT %negate.1 = f32[512,512]{1,0} negate(%bitcast.1)
}

%fused_update (param_0.1: f32[8,512,512], param_1.1: f32[512,512], param_2.1: s32[]) -> f32[8,512,512] {
  %param_1.1 = f32[512,512]{1,0} parameter(1)
  %param_0.1 = f32[8,512,512]{2,1,0} parameter(0)
  %param_2.1 = s32[] parameter(2)
  %constant.2 = s32[] constant(0)
  %bitcast.2 = f32[1,512,512]{2,1,0} bitcast(%param_1.1)
  ROOT %update.1 = f32[8,512,512]{2,1,0} dynamic-update-slice(%param_0.1, %bitcast.2, %param_2.1, %constant.2)
}

%fused_product (param_0.2: bf16[512,512], param_1.2: bf16[512,512]) -> bf16[512,512] {
  %param_0.2 = bf16[512,512]{1,0} parameter(0)
  %param_1.2 = bf16[512,512]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,512]{1,0} dot(%param_0.2, %param_1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg: (f32[512,512])) -> (f32[512,512]) {
  %arg = (f32[512,512]{1,0}) parameter(0)
  %get-tuple-element.1 = f32[512,512]{1,0} get-tuple-element(%arg), index=0
  %copy.1 = f32[512,512]{0,1} copy(%get-tuple-element.1)
  ROOT %tuple.1 = (f32[512,512]{0,1}) tuple(%copy.1)
}

%two_copies (arg.1: f32[512,512]) -> f32[512,512] {
  %arg.1 = f32[512,512]{1,0} parameter(0)
  %copy.2 = f32[512,512]{0,1} copy(%arg.1)
  ROOT %copy.3 = f32[512,512]{1,0} copy(%copy.2)
}

%one_copy (arg.2: f32[512,512]) -> f32[512,512] {
  %arg.2 = f32[512,512]{1,0} parameter(0)
  ROOT %copy.4 = f32[512,512]{0,1} copy(%arg.2)
}

ENTRY %main (a: bf16[512,512], f: f32[512,512], s: f32[8,512,512], i: s32[], q: bf16[2,64,4,32]) -> f32[512,512] {
  %a = bf16[512,512]{1,0} parameter(0)
  %f = f32[512,512]{1,0} parameter(1)
  %s = f32[8,512,512]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %q = bf16[2,64,4,32]{3,2,1,0} parameter(4)
  %t = (f32[512,512]{1,0}) tuple(%f)
"""
MATMUL = (
    '  %x = ({0}[512,512]{{1,0}}, s8[33554432]{{0}}) custom-call(%{1}, %{1}), custom_call_target="__cublas$lt$matmul", '
    'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}}}}'
)
ATTENTION = (
    "  %x = (bf16[2,4,64,32]{3,1,2,0}, f32[2,4,64]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), "
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "CAUSAL"}}'
)


@pytest.mark.parametrize(
    ("kernel", "flops_seconds", "moved_bytes"),
    [
        ("  %x = f32[512,512]{0,1} copy(%f)", 0, 2 * MIB),
        ("  %x = f32[512,512]{1,0} fusion(%s, %i), kind=kLoop, calls=%fused_slice", 0, 2 * MIB + 4),
        ("  %x = f32[8,512,512]{2,1,0} fusion(%s, %f, %i), kind=kLoop, calls=%fused_update", 0, 2 * MIB + 4),
        (MATMUL.format("bf16", "a"), 0, 1.5 * MIB),
        (MATMUL.format("f32", "f"), 2 * 512**3 / 5e10, 0),
        ("  %x = bf16[512,512]{1,0} fusion(%a, %a), kind=kCustom, calls=%fused_product", 0, 1.5 * MIB),
        (ATTENTION, 0, 4 * 2**15 + 2**11),
        ('  %x = (f32[512,512]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
         0, 3 * 2 * MIB),
        ("  %x = f32[512,512] conditional(%i, %f, %f), branch_computations={%two_copies, %one_copy}", 0, 2 * MIB),
        ("  %x = f32[512,512] call(%f), to_apply=%two_copies", 0, 4 * MIB),
        ("  %x = bf16[1,512,512]{2,1,0} bitcast(%a)", 0, 0),
    ],
)  # fmt: skip
def test_kernel_takes_its_flops_or_its_bytes_whichever_take_longer(kernel, flops_seconds, moved_bytes):
    """Of a stack that a loop slices or updates in place, only the slice moves; a library's work space does not."""
    time = least_time(HEAD + kernel + "\n}\n", RATES, BYTES_PER_S)
    assert time == (pytest.approx(flops_seconds), pytest.approx(moved_bytes / BYTES_PER_S))


def test_kernels_run_one_after_another():
    text = HEAD + MATMUL.format("f32", "f") + "\n  %y = f32[512,512]{0,1} copy(%f)\n}\n"
    assert least_time(text, RATES, BYTES_PER_S) == pytest.approx((2 * 512**3 / 5e10, 2 * MIB / BYTES_PER_S))


CONVOLUTION = """HloModule jit_f

ENTRY %main (x: bf16[8,33,33,64], w: bf16[128,3,3,64], y: bf16[8,16,16,128]) -> bf16[8,16,16,128] {
  %x = bf16[8,33,33,64]{3,2,1,0} parameter(0)
  %w = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %y = bf16[8,16,16,128]{3,2,1,0} parameter(2)
"""


@pytest.mark.parametrize(
    ("result", "operands", "target"),
    [
        ("bf16[8,16,16,128]", "%x, %w", "Forward"),
        ("bf16[8,33,33,64]", "%y, %w", "BackwardInput"),
        ("bf16[128,3,3,64]", "%x, %y", "BackwardFilter"),
    ],
)
def test_convolution_and_its_gradients_have_the_same_flops(result, operands, target):
    kernel = (
        f"  %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call({operands}), window={{size=3x3 stride=2x2}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"'
    )
    flops = 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)
    assert least_time(CONVOLUTION + kernel + "\n}\n", {"bf16": 1e6}, 1e12).compute == pytest.approx(flops / 1e6)


@pytest.mark.parametrize(("start", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_attention_counts_half_of_each_product(start, products):
    """Two products forward, and five backward with recomputed scores; a causal mask hides half."""
    text = HEAD + ATTENTION.replace("__cudnn$fmhaSoftmax", start) + "\n}\n"
    flops = products * 2 * (2 * 4) * 64 * 64 * 32 / 2
    assert least_time(text, {"bf16": 1e6}, BYTES_PER_S).compute == pytest.approx(flops / 1e6)
