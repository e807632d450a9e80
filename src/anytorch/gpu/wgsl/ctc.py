"""Connectionist temporal classification (Graves et al. 2006), in logarithms: the walks along time, and the gradient.

A target of S labels is walked as 2 S + 1 states: a blank, a label, a blank, … A workgroup has one sample; its threads share
the states, and all wait for each other at every step of time. Log-probabilities are (T, N, C), the walks that are kept
(N, T, L). "Nothing" is minus infinity in memory; in a shader, which need not know infinities, it is told by comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import head

THREADS = 64
FIRST = 1 << 30  # in a chain: no state before this one has its label
PARAMETERS = ("T", "N", "C", "L", "S", "blank")

# lengths: input length, target length, where the target begins; of each sample.
_FUNCTIONS = """const LEAST = -3.0e38;
fn input_length(n: u32) -> u32 { return u32(lengths[n * 3u]); }
fn target_length(n: u32) -> u32 { return u32(lengths[n * 3u + 1u]); }
fn label_of(n: u32, s: u32) -> u32 {
  if ((s & 1u) == 0u) { return p.blank; }
  return min(u32(max(targets[u32(lengths[n * 3u + 2u]) + s / 2u], 0)), p.C - 1u);
}
fn scores_at(t: u32, n: u32) -> u32 { return p.o_scores + (t * p.N + n) * p.C; }
fn added(a: f32, b: f32, c: f32) -> f32 {
  if (is_nan(a) || is_nan(b) || is_nan(c)) { return quiet_nan(); }
  let most = max(a, max(b, c));
  if (most < LEAST) { return -infinity(); }
  var sum = 0.0;
  if (!(a < LEAST)) { sum += exp_f32(a - most); }
  if (!(b < LEAST)) { sum += exp_f32(b - most); }
  if (!(c < LEAST)) { sum += exp_f32(c - most); }
  return log_f32(sum) + most;
}
fn joined(walk: f32, score: f32) -> f32 {
  if (walk < LEAST || score < LEAST) { return -infinity(); }
  return walk + score;
}
"""


@dataclass(frozen=True)
class Walk:
    """One of the two walks: "alpha" goes forward and tells the loss, "beta" goes back."""

    backward: bool


def _whole(parts: str) -> str:
    text = _FUNCTIONS + parts
    return needed(text) + text


def render_walk(kernel: Walk) -> str:
    """Bindings: scores (with a place), targets and lengths (i32), the walk, and forward the losses."""
    written = {"walk": "f32"} if kernel.backward else {"walk": "f32", "losses": "f32"}
    if kernel.backward:
        start = "select(2u * size, 0u, size == 0u)", "2u * size - 1u"
        order, before = "steps - 1u - step", "t + 1u"
        second, third = "s + 1u < states", "s + 2u < states && label_of(n, s + 2u) != label"
        near, far = "s + 1u", "s + 2u"
    else:
        start = "0u", "1u"
        order, before = "step", "t - 1u"
        second, third = "s >= 1u", "s >= 2u && label_of(n, s - 2u) != label"
        near, far = "s - 1u", "s - 2u"
    loss = (
        ""
        if kernel.backward
        else """  if (thread == 0u) {
    let last = (n * p.T + steps - 1u) * p.L + 2u * size;
    var total = walk[last];
    if (size > 0u) { total = added(walk[last], walk[last - 1u], -infinity()); }
    losses[n] = -total;
  }
"""
    )
    nothing = "" if kernel.backward else "    if (thread == 0u) { losses[n] = select(infinity(), 0.0, size == 0u); }\n"
    body = f"""@compute @workgroup_size({THREADS}) fn main(@builtin(workgroup_id) group: vec3<u32>,
  @builtin(local_invocation_index) thread: u32) {{
  let n = group.x + group.y * p.row;
  if (n >= p.N) {{ return; }}
  let steps = input_length(n); let size = target_length(n); let states = 2u * size + 1u;
  if (steps == 0u) {{
{nothing}    return;
  }}
  for (var step = 0u; step < steps; step++) {{
    let t = {order}; let here = (n * p.T + t) * p.L; let there = (n * p.T + {before}) * p.L; let at = scores_at(t, n);
    for (var s = thread; s < states; s += {THREADS}u) {{
      let label = label_of(n, s); let score = scores[at + label];
      var value = -infinity();
      if (step == 0u) {{
        if (s == {start[0]} || (size > 0u && s == {start[1]})) {{ value = score; }}
      }} else {{
        var second = -infinity(); var third = -infinity();
        if ({second}) {{ second = walk[there + {near}]; }}
        if ({third}) {{ third = walk[there + {far}]; }}
        value = joined(added(walk[there + s], second, third), score);
      }}
      walk[here + s] = value;
    }}
    storageBarrier();
  }}
{loss}}}
"""
    return head(
        (*PARAMETERS, "row", "o_scores"), {"scores": "f32", "targets": "i32", "lengths": "i32"}, written
    ) + _whole(body)


@dataclass(frozen=True)
class Chain:
    """For every label of a target, where the same label comes next (counted from 1; 0: never), and FIRST."""


def render_chain(_: Chain) -> str:
    """Bindings: targets, lengths, the chain (N, S). A thread per label."""
    body = f"""@compute @workgroup_size({THREADS}) fn main(@builtin(global_invocation_id) g: vec3<u32>) {{
  let i = g.x + g.y * p.row * {THREADS}u;
  if (i >= p.N * p.S) {{ return; }}
  let n = i / p.S; let k = i % p.S; let size = target_length(n);
  if (k >= size) {{ return; }}
  let label = label_of(n, 2u * k + 1u);
  var word = {FIRST}u;
  for (var j = 0u; j < k; j++) {{ if (label_of(n, 2u * j + 1u) == label) {{ word = 0u; break; }} }}
  for (var j = k + 1u; j < size; j++) {{ if (label_of(n, 2u * j + 1u) == label) {{ word |= j + 1u; break; }} }}
  chain[i] = i32(word);
}}
"""
    functions = _FUNCTIONS[: _FUNCTIONS.index("fn scores_at")]
    return head((*PARAMETERS, "row"), {"targets": "i32", "lengths": "i32"}, {"chain": "i32"}) + functions + body


@dataclass(frozen=True)
class Gradient:
    """Two launches: "all" gives every class what it has without a target, "states" takes the states' shares away."""

    stage: str
    zero_infinity: bool


def render_gradient(kernel: Gradient) -> str:
    """Bindings: scores, targets, lengths, pairs of a loss and its gradient; alpha, beta, chain ("states"); the result."""
    read = {"scores": "f32", "targets": "i32", "lengths": "i32", "pairs": "vec2<f32>"}
    if kernel.stage == "all":
        impossible = "0.0" if kernel.zero_infinity else "quiet_nan()"
        body = f"""@compute @workgroup_size({THREADS}) fn main(@builtin(global_invocation_id) g: vec3<u32>) {{
  let i = g.x + g.y * p.row * {THREADS}u;
  if (i >= p.T * p.N * p.C) {{ return; }}
  let n = i / p.C % p.N; let t = i / (p.C * p.N);
  var value = 0.0;
  if (t < input_length(n)) {{
    value = {impossible};
    if (is_nan(pairs[n].x)) {{ value = quiet_nan(); }}
    else if (pairs[n].x < -LEAST) {{ value = exp_f32(scores[p.o_scores + i]) * pairs[n].y; }}
  }}
  out[i] = value;
}}
"""
    else:
        read |= {"alpha": "f32", "beta": "f32", "chain": "i32"}
        body = f"""fn share(t: u32, n: u32, s: u32, score: f32) -> f32 {{
  let a = alpha[(n * p.T + t) * p.L + s]; let b = beta[(n * p.T + t) * p.L + s];
  if (a < LEAST || b < LEAST || score < LEAST) {{ return 0.0; }}
  return exp_f32(a + b + pairs[n].x - score);
}}
@compute @workgroup_size({THREADS}) fn main(@builtin(global_invocation_id) g: vec3<u32>) {{
  let i = g.x + g.y * p.row * {THREADS}u;
  if (i >= p.T * p.N * (p.S + 1u)) {{ return; }}
  let k = i % (p.S + 1u); let n = i / (p.S + 1u) % p.N; let t = i / ((p.S + 1u) * p.N);
  let size = target_length(n);
  if (t >= input_length(n) || k > size || is_nan(pairs[n].x) || !(pairs[n].x < -LEAST)) {{ return; }}
  let at = scores_at(t, n); var sum = 0.0; var label = p.blank;
  if (k == size) {{  // the blanks; and who names the blank as a label is counted here too
    let score = scores[at + p.blank];
    for (var s = 0u; s < 2u * size + 1u; s++) {{
      if (label_of(n, s) == p.blank) {{ sum += share(t, n, s, score); }}
    }}
  }} else {{
    label = label_of(n, 2u * k + 1u);
    var word = u32(chain[n * p.S + k]);
    if (label == p.blank || (word & {FIRST}u) == 0u) {{ return; }}
    let score = scores[at + label];
    var j = k;
    loop {{
      sum += share(t, n, 2u * j + 1u, score);
      word = u32(chain[n * p.S + j]) & {FIRST - 1}u;
      if (word == 0u) {{ break; }}
      j = word - 1u;
    }}
  }}
  out[at - p.o_scores + label] -= sum * pairs[n].y;
}}
"""
    return head((*PARAMETERS, "row", "o_scores"), read, {"out": "f32"}) + _whole(body)
