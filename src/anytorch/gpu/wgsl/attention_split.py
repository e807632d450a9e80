"""The two attention kernels of decoding with many keys: "split" and "join" (see `wgsl.attention`)."""

from __future__ import annotations

from anytorch.gpu.wgsl.attention_kernel import AT_ONCE, LANES, LOWEST, Attention, head


def split(kernel: Attention) -> str:
    """Line `i` of the workgroup is one query of one of the heads that share these keys.

    All loads of a workgroup's keys, and the first of its values, are under way before anything waits.
    """
    lines, keys, threads = kernel.queries, kernel.keys, kernel.threads
    vectors = kernel.dimension // 4
    teams = threads // LANES  # each takes a key at a time
    parts = threads // vectors
    ahead = min(8, -(-keys // parts))  # values a thread loads at a time
    per_line = threads // lines  # threads that fold a line's scores
    every = range(lines)
    builtins = ", @builtin(local_invocation_index) t: u32"
    place = ""
    if kernel.subgroups:  # neighbours by the subgroup's own numbers: only those may shuffle
        builtins = ", @builtin(subgroup_size) size: u32, @builtin(subgroup_id) number: u32, "
        builtins += "@builtin(subgroup_invocation_id) within: u32"
        place = "  let t = number * size + within;\n"
        team = (
            "fn team(mine: f32, t: u32) -> f32 { var x = mine; x += subgroupShuffleXor(x, 1u); "
            "x += subgroupShuffleXor(x, 2u); return x; }\n"
        )
    else:
        team = (
            "fn team(mine: f32, t: u32) -> f32 { workgroupBarrier(); ladder[t] = mine; workgroupBarrier();\n"
            "  let i = t & ~3u; return ladder[i] + ladder[i + 1u] + ladder[i + 2u] + ladder[i + 3u]; }\n"
        )

    def values(first: str) -> str:
        return "".join(
            f"    {{ let key = {first} + part + {u * parts}u; "
            f"if (part < {parts}u && key < last) {{ v_{u} = v4(batch, first_head, key, column * 4u); }} }}\n"
            for u in range(ahead)
        )

    text = [
        f"var<workgroup> query_rows: array<vec4<f32>, {lines * vectors}>;\n",
        f"var<workgroup> weights: array<f32, {lines * keys}>;\n",
        f"var<workgroup> ladder: array<f32, {threads}>;\nvar<workgroup> totals: array<f32, {threads}>;\n",
        f"var<workgroup> outputs: array<vec4<f32>, {min(lines, AT_ONCE) * threads}>;\n",
        team,
        f"@compute @workgroup_size({threads}) fn main(@builtin(workgroup_id) group: vec3<u32>{builtins}) {{\n{place}",
        "  let linear = group.x + group.y * p.row;\n  if (linear >= p.total) { return; }\n",
        "  let here = linear % p.parts; let block = (linear / p.parts) % p.blocks;\n",
        "  let key_heads = p.heads / p.shared_by; let pair = linear / (p.parts * p.blocks);\n",
        "  let first_head = (pair % key_heads) * p.shared_by; let batch = pair / key_heads;\n",
        f"  let all_lines = p.shared_by * p.queries; let line0 = block * {lines}u;\n",
        f"  let first = here * {keys}u; let last = min(p.keys, first + {keys}u);\n",
        f"  for (var e = t; e < {lines * vectors}u; e += {threads}u) {{\n"
        f"    let line = min(line0 + e / {vectors}u, all_lines - 1u);\n"
        f"    query_rows[e] = q4(batch, first_head + line / p.queries, line % p.queries, (e % {vectors}u) * 4u);\n  }}\n",
        f"  let column = t % {vectors}u; let part = t / {vectors}u;\n",
        *[f"  var v_{u} = vec4<f32>();\n" for u in range(ahead)],
        values("first"),
        "  workgroupBarrier();\n",
        f"  for (var j0 = 0u; j0 < {keys}u; j0 += {teams}u) {{\n"
        f"    let j = j0 + t / {LANES}u; let key = min(first + j, last - 1u);\n",
        *[f"    var s_{i} = 0.0;\n" for i in every],
        *[_dots(range(e, min(e + 8, -(-vectors // LANES))), vectors, lines) for e in range(0, -(-vectors // LANES), 8)],
        *[f"    s_{i} = team(s_{i}, t);\n" for i in every],
        f"    if (t % {LANES}u == 0u) {{\n",
    ]
    for i in every:
        text.append(
            f"      {{ let line = line0 + {i}u; weights[{i * keys}u + j] = score(batch, first_head + line / p.queries, "
            f"line % p.queries, first + j, s_{i}); }}\n"
        )
    text += [
        "    }\n  }\n  workgroupBarrier();\n",
        # Each line's maximum and sum, by some of the threads.
        f"  let mine = min(t / {per_line}u, {lines - 1}u); let member = t - mine * {per_line}u;\n"
        f"  let members = select({per_line}u, {threads - (lines - 1) * per_line}u, mine == {lines - 1}u);\n"
        f"  var most = {LOWEST};\n"
        f"  for (var j = member; j < {keys}u; j += members) {{ most = max(most, weights[mine * {keys}u + j]); }}\n"
        "  ladder[t] = most;\n  workgroupBarrier();\n"
        f"  for (var j = 0u; j < members; j++) {{ most = max(most, ladder[mine * {per_line}u + j]); }}\n"
        "  var sum = 0.0;\n"
        f"  for (var j = member; j < {keys}u; j += members) {{\n"
        f"    let w = weight(weights[mine * {keys}u + j], most); weights[mine * {keys}u + j] = w; sum += w;\n  }}\n"
        "  totals[t] = sum;\n  workgroupBarrier();\n"
        "  let lines_in_all = p.total / (p.parts * p.blocks) * all_lines; let line = line0 + mine;\n"
        "  if (member == 0u && line < all_lines) {\n"
        f"    for (var j = 1u; j < members; j++) {{ sum += totals[mine * {per_line}u + j]; }}\n"
        f"    parts[lines_in_all * p.parts * {vectors}u + (pair * all_lines + line) * p.parts + here] = "
        "vec4<f32>(most, sum, 0.0, 0.0);\n  }\n",
        *[f"  var o_{i} = vec4<f32>();\n" for i in every],
        f"  for (var block0 = first; block0 < last; block0 += {ahead * parts}u) {{\n",
        "    if (block0 > first) {\n",
        values("block0"),
        "    }\n",
    ]
    for u in range(ahead):
        text.append(f"    {{ let key = block0 + part + {u * parts}u; if (part < {parts}u && key < last) {{\n")
        text += [f"      o_{i} += weights[{i * keys}u + key - first] * v_{u};\n" for i in every]
        text.append("    } }\n")
    text.append("  }\n")
    for start in range(0, lines, AT_ONCE):
        some = range(start, min(start + AT_ONCE, lines))
        text += [f"  outputs[{(i - start) * threads}u + t] = o_{i};\n" for i in some]
        text.append(
            f"  workgroupBarrier();\n  for (var e = t; e < {len(some) * vectors}u; e += {threads}u) {{\n"
            f"    let i = e / {vectors}u; let c = e % {vectors}u; let line = line0 + {start}u + i;\n"
            "    if (line < all_lines) {\n      var whole = vec4<f32>();\n"
            f"      for (var j = 0u; j < {parts}u; j++) {{ whole += outputs[i * {threads}u + j * {vectors}u + c]; }}\n"
            f"      parts[((pair * all_lines + line) * p.parts + here) * {vectors}u + c] = whole;\n    }}\n  }}\n"
        )
        if some.stop < lines:
            text.append("  workgroupBarrier();\n")
    return "".join(text) + "}\n"


def _dots(steps: range, vectors: int, lines: int) -> str:
    """Some of a thread's share of a key, loaded at once, times that of every line's query."""
    text = ["    {\n"]
    for e in steps:
        text.append(f"      var k_{e} = vec4<f32>(); let d_{e} = t % {LANES}u + {e * LANES}u;\n")
        whole = (e + 1) * LANES <= vectors
        text.append(
            f"      {'' if whole else f'if (d_{e} < {vectors}u) '}{{ k_{e} = k4(batch, first_head, key, d_{e} * 4u); }}\n"
        )
    for e in steps:
        text += [
            f"      s_{i} += dot(query_rows[{i * vectors}u + min(d_{e}, {vectors - 1}u)], k_{e});\n"
            for i in range(lines)
        ]
    return "".join(text) + "    }\n"


def join(kernel: Attention) -> str:
    """Lines are numbered as `split` does, which is batch, head, query."""
    vectors, threads = kernel.dimension // 4, kernel.threads
    parts = threads // vectors
    return (
        f"var<workgroup> ladder: array<vec2<f32>, {threads}>;\nvar<workgroup> outputs: array<vec4<f32>, {threads}>;\n"
        + head(kernel, "group.x + group.y * p.row")
        + f"""  let all_lines = p.total / (p.parts * p.blocks) * p.shared_by * p.queries;
  if (linear >= all_lines) {{ return; }}
  let query = linear % p.queries; let head = (linear / p.queries) % p.heads; let batch = linear / (p.queries * p.heads);
  let tops = all_lines * p.parts * {vectors}u + linear * p.parts;
  var top = {LOWEST}; var sum = 0.0;
  for (var j = t; j < p.parts; j += {threads}u) {{
    let other = parts[tops + j]; let next = max(top, other.x);
    sum = sum * weight(top, next) + other.y * weight(other.x, next); top = next;
  }}
  ladder[t] = vec2<f32>(top, sum);
  workgroupBarrier();
  let used = min(p.parts, {threads}u);
  for (var j = 0u; j < used; j++) {{ top = max(top, ladder[j].x); }}
  sum = 0.0;
  for (var j = 0u; j < used; j++) {{ sum += ladder[j].y * weight(ladder[j].x, top); }}
  let column = t % {vectors}u; let part = t / {vectors}u;
  var o = vec4<f32>();
  if (part < {parts}u) {{
    for (var j = part; j < p.parts; j += {parts}u) {{
      o += weight(parts[tops + j].x, top) * parts[(linear * p.parts + j) * {vectors}u + column];
    }}
  }}
  outputs[t] = o;
  workgroupBarrier();
  if (part == 0u) {{
    var whole = vec4<f32>();
    for (var j = 0u; j < {parts}u; j++) {{ whole += outputs[j * {vectors}u + column]; }}
    var inverse = 0.0; if (sum > 0.0) {{ inverse = 1.0 / sum; }}
    put(batch, head, query, column * 4u, whole * inverse);
    if (t == 0u) {{ put_sum(batch, head, query, top, sum); }}
  }}
}}
"""
    )
