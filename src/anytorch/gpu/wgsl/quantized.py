"""Products with weights kept as 8- or 4-bit integers, unpacked on load; the schedules are those of `wgsl.matmul`.

int8    weight[n, k] is an i8; its row's scale is applied to the finished sum
int4    weight[n, k] is a nibble, eight to a word, lowest bits first; (q - 8) * scale + zero, one of each per group of k
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.matmul import SCHEDULE_PARAMETERS, Problem, load_functions
from anytorch.gpu.wgsl.types import KINDS, element, load, stored


@dataclass(frozen=True)
class Quantized:
    bits: int  # 8 or 4
    activation: str  # dtype of x, which is contiguous along k
    scales: str  # dtype
    output: str
    group: int = 0  # elements of k per scale, for 4 bits: a multiple of 4
    a_vector: bool = False


def quantized(spec: Quantized) -> Problem:
    at = "p.a_at + m * p.a_row + k"
    loads = load_functions("a", spec.activation, spec.a_vector, "batch: u32, m: u32, k: u32", at)
    finished = "v"
    if spec.bits == 8:
        loads += (
            "fn load_b4(batch: u32, k: u32, n: u32) -> vec4<f32> {\n"
            "  let word = bitcast<i32>(b[(p.b_at + n * p.k + k) / 4u]);\n"
            "  return vec4<f32>(vec4<i32>(word << 24u, word << 16u, word << 8u, word) >> vec4<u32>(24u)); }\n"
        )
        finished = f"v * {load(spec.scales, 'd', '(p.d_at + n)')}"
    else:
        place = f"(p.d_at + ((k / {spec.group}u) * p.n + n) * 2u"
        loads += (
            "fn load_b4(batch: u32, k: u32, n: u32) -> vec4<f32> {\n"
            "  let word = b[p.b_at + (n * p.k + k) / 8u] >> ((k & 4u) * 4u);\n"
            "  let q = vec4<f32>((vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u)) - 8.0;\n"
            f"  return q * {load(spec.scales, 'd', place + ')')} + {load(spec.scales, 'd', place + ' + 1u)')}; }}\n"
        )
    loads += "fn load_b(batch: u32, k: u32, n: u32) -> f32 { return load_b4(batch, k & ~3u, n)[k & 3u]; }\n"
    store = (
        f"fn store(batch: u32, part: u32, m: u32, n: u32, v: f32) "
        f"{{ c[p.c_at + m * p.c_row + n] = {stored(spec.output, finished)}; }}\n"
        "fn store4(batch: u32, part: u32, m: u32, n: u32, v: vec4<f32>) { "
        + " ".join(f"if (n + {j}u < p.n) {{ store(batch, part, m, n + {j}u, v.{a}); }}" for j, a in enumerate("xyzw"))
        + " }\n"
    )
    return Problem(
        (element(spec.activation, spec.a_vector), "u32", KINDS[spec.scales].storage, KINDS[spec.output].storage),
        (*SCHEDULE_PARAMETERS, "a_row", "c_row"),
        loads + store,
        (spec.activation, spec.scales, spec.output),
        a_along="k",
        b_along="k",
        a_vector=spec.a_vector,
        b_vector=True,
    )
