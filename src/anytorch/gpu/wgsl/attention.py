"""Attention in one kernel: the scores of a query never leave the chip; the softmax is corrected as later keys arrive.

    tile     a workgroup for a block of queries; blocks of keys pass through workgroup memory
    short    a workgroup for one query: the decoding step, where there is only one
    split    a workgroup for a few keys of one head and the queries of all heads that share it: decoding with many keys;
             writes each part's maximum, sum and unscaled output
    join     a workgroup for one query: folds what "split" has written
    row      a thread for one query, without workgroup memory or barriers: for CPU adapters

Where asked, also writes the logarithm of each row's sum of exponentials, from which the backward pass recomputes the
probabilities. Rows with no key to look at give zeros.
"""

from __future__ import annotations

from anytorch.gpu.wgsl.attention_kernel import AT_ONCE, CHUNK, LANES, LOWEST, PARAMETERS, Attention, main
from anytorch.gpu.wgsl.types import element, head, load, load_four, stored_four


def render(kernel: Attention) -> str:
    four = element(kernel.dtype, True)
    kinds = {"sums": "f32", "parts": "vec4<f32>", "mask": kernel.mask}
    read, written = (
        {name: kinds.get(name, four) for name in kernel.operands if kernel.writes(name) == writes}
        for writes in (False, True)
    )
    fields = (*[f"{name}_at" for name in kernel.operands], *PARAMETERS)
    lines = [head(fields, read, written, {kernel.dtype})]
    if kernel.form != "join":
        lines += [_read_four(kernel, name) for name in "qkv"]
        lines.append(_score(kernel))
    lines.append(_WEIGHT)
    if kernel.form != "split":
        lines.append(_put(kernel))
    forms = {"tile": _tile, "short": _short, "split": _split, "join": _join, "row": _row}
    return "".join(lines) + forms[kernel.form](kernel)


def _read_four(kernel: Attention, name: str) -> str:
    head = "head / p.shared_by" if name != "q" else "head"
    return (
        f"fn {name}4(batch: u32, head: u32, place: u32, d: u32) -> vec4<f32> {{ "
        f"let i = p.{name}_at + batch * p.{name}_batch + ({head}) * p.{name}_head + place * p.{name}_place + d; "
        f"return {load_four(kernel.dtype, name, 'i')}; }}\n"
    )


def _put(kernel: Attention) -> str:
    kept = "sums[p.sums_at + (batch * p.heads + head) * p.queries + place] = value;" if kernel.sums else ""
    return (
        "fn put(batch: u32, head: u32, place: u32, d: u32, o: vec4<f32>) { "
        "let i = p.out_at + batch * p.out_batch + head * p.out_head + place * p.out_place + d; "
        f"out[i / 4u] = {stored_four(kernel.dtype, 'o')}; }}\n"
        "fn put_sum(batch: u32, head: u32, place: u32, top: f32, sum: f32) { "
        f"var value = {LOWEST}; if (sum > 0.0) {{ value = top + log(sum); }} {kept} }}\n"
    )


# A row all of whose keys are hidden has a top of LOWEST: its weights are zero, not exp(0).
_WEIGHT = f"fn weight(s: f32, top: f32) -> f32 {{ if (s <= {LOWEST}) {{ return 0.0; }} return exp(s - top); }}\n"


def _score(kernel: Attention) -> str:
    """The score of a pair, scaled and masked."""
    body = "var s = dot * p.scale;"
    if kernel.mask:
        at = "(p.mask_at + batch * p.mask_batch + head * p.mask_head + query * p.mask_query + key * p.mask_key)"
        value = load(kernel.mask, "mask", at)
        if kernel.mask == "bool":
            body += f" if ({value} == 0) {{ return {LOWEST}; }}"
        else:
            body += f" s = max(s + {value}, {LOWEST});"
    condition = "key >= p.keys" + (" || key > query" if kernel.causal else "")
    return (
        "fn score(batch: u32, head: u32, query: u32, key: u32, dot: f32) -> f32 {\n"
        f"  if (query >= p.queries || {condition}) {{ return {LOWEST}; }}\n  {body} return s;\n}}\n"
    )


def _row(kernel: Attention) -> str:
    vectors = kernel.dimension // 4
    end = "min(p.keys, query + 1u)" if kernel.causal else "p.keys"
    return (
        main(kernel, f"(group.x + group.y * p.row) * {kernel.threads}u + t")
        + f"""  if (linear >= p.total) {{ return; }}
  let query = linear % p.queries; let head = (linear / p.queries) % p.heads; let batch = linear / (p.queries * p.heads);
  var o: array<vec4<f32>, {vectors}>;
  var query_row: array<vec4<f32>, {vectors}>;
  for (var d = 0u; d < {vectors}u; d++) {{ o[d] = vec4<f32>(); query_row[d] = q4(batch, head, query, d * 4u); }}
  var top = {LOWEST}; var sum = 0.0;
  for (var key = 0u; key < {end}; key++) {{
    var product = 0.0;
    for (var d = 0u; d < {vectors}u; d++) {{ product += dot(query_row[d], k4(batch, head, key, d * 4u)); }}
    let s = score(batch, head, query, key, product);
    let next = max(top, s);
    let keep = weight(top, next);
    let w = weight(s, next);
    sum = sum * keep + w; top = next;
    for (var d = 0u; d < {vectors}u; d++) {{ o[d] = o[d] * keep + w * v4(batch, head, key, d * 4u); }}
  }}
  var inverse = 0.0; if (sum > 0.0) {{ inverse = 1.0 / sum; }}
  for (var d = 0u; d < {vectors}u; d++) {{ put(batch, head, query, d * 4u, o[d] * inverse); }}
  put_sum(batch, head, query, top, sum);
}}
"""
    )


def _short(kernel: Attention) -> str:
    vectors = kernel.dimension // 4
    parts = 256 // vectors
    end = "min(p.keys, query + 1u)" if kernel.causal else "p.keys"
    return (
        f"var<workgroup> query_row: array<vec4<f32>, {vectors}>;\n"
        "var<workgroup> weights: array<f32, 256>;\nvar<workgroup> ladder: array<f32, 256>;\n"
        "var<workgroup> partial: array<vec4<f32>, 256>;\n"
        + main(kernel, "group.x + group.y * p.row")
        + f"""  let query = linear % p.queries; let head = (linear / p.queries) % p.heads;
  let batch = min(linear, p.total - 1u) / (p.queries * p.heads);
  if (t < {vectors}u) {{ query_row[t] = q4(batch, head, query, t * 4u); }}
  workgroupBarrier();
  let column = t % {vectors}u; let part = t / {vectors}u;
  var o = vec4<f32>(); var top = {LOWEST}; var sum = 0.0;
  let end = {end};
  for (var first = 0u; first < end; first += 256u) {{
    let key = first + t;
    var s = {LOWEST};
    if (key < end) {{
      var product = 0.0;
      for (var d = 0u; d < {vectors}u; d++) {{ product += dot(query_row[d], k4(batch, head, key, d * 4u)); }}
      s = score(batch, head, query, key, product);
    }}
    ladder[t] = s;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {{
      if (t < half) {{ ladder[t] = max(ladder[t], ladder[t + half]); }}
      workgroupBarrier();
    }}
    let next = max(top, ladder[0]);
    let keep = weight(top, next);
    top = next;
    let w = weight(s, next);
    sum = sum * keep + w;
    weights[t] = w;
    workgroupBarrier();
    o *= keep;
    if (part < {parts}u) {{
      for (var j = part; j < min(256u, end - first); j += {parts}u) {{
        o += weights[j] * v4(batch, head, first + j, column * 4u);
      }}
    }}
    workgroupBarrier();
  }}
  ladder[t] = sum; partial[t] = o;
  workgroupBarrier();
  for (var half = 128u; half > 0u; half /= 2u) {{
    if (t < half) {{ ladder[t] += ladder[t + half]; }}
    workgroupBarrier();
  }}
  if (part == 0u && linear < p.total) {{
    var whole = vec4<f32>();
    for (var j = 0u; j < {parts}u; j++) {{ whole += partial[j * {vectors}u + column]; }}
    let total = ladder[0];
    var inverse = 0.0; if (total > 0.0) {{ inverse = 1.0 / total; }}
    put(batch, head, query, column * 4u, whole * inverse);
    if (t == 0u) {{ put_sum(batch, head, query, top, total); }}
  }}
}}
"""
    )


def _tile(kernel: Attention) -> str:
    queries, keys, threads = kernel.queries, kernel.keys, kernel.threads
    across = keys // 4  # threads along keys
    vectors = kernel.dimension // 4
    width = CHUNK // 4 + 1
    weights_width = keys // 4 + 1
    columns = -(-vectors // across)
    step = kernel.value_keys
    chunk4 = CHUNK // 4
    lines = [
        f"var<workgroup> tile_q: array<vec4<f32>, {queries * width}>;\n",
        f"var<workgroup> tile_k: array<vec4<f32>, {keys * width}>;\n",
        f"var<workgroup> weights: array<vec4<f32>, {queries * weights_width}>;\n",
        f"var<workgroup> ladder: array<vec4<f32>, {queries * across // 4}>;\n",
        f"var<workgroup> tile_v: array<vec4<f32>, {step * vectors}>;\n",
        main(kernel, "group.x + group.y * p.row"),
        "  let block = linear % p.blocks; let head = (linear / p.blocks) % p.heads;\n",
        "  let batch = min(linear, p.total - 1u) / (p.blocks * p.heads);\n",
        f"  let q0 = block * {queries}u; let tx = t % {across}u; let ty = t / {across}u;\n",
    ]
    lines += [f"  var o{r}_{c} = vec4<f32>();\n" for r in range(4) for c in range(columns)]
    lines += [f"  var top{r} = {LOWEST}; var sum{r} = 0.0;\n" for r in range(4)]
    end = f"min(p.keys, q0 + {queries}u)" if kernel.causal else "p.keys"
    lines.append(f"  let end = {end};\n  for (var k0 = 0u; k0 < end; k0 += {keys}u) {{\n")
    # Scores: both operands pass through workgroup memory a chunk of the dimension at a time.
    lines += [f"  var s{r}_{c} = 0.0;\n" for r in range(4) for c in range(4)]
    lines.append(f"  for (var d0 = 0u; d0 < {kernel.dimension}u; d0 += {CHUNK}u) {{\n")
    for name, rows, first, limit in (("q", queries, "q0", "p.queries"), ("k", keys, "k0", "p.keys")):
        lines.append(
            f"    for (var e = t; e < {rows * chunk4}u; e += {threads}u) {{\n"
            f"      let line = e / {chunk4}u; let d = e % {chunk4}u; var value = vec4<f32>();\n"
            f"      if ({first} + line < {limit} && d0 + d * 4u < {kernel.dimension}u) "
            f"{{ value = {name}4(batch, head, {first} + line, d0 + d * 4u); }}\n"
            f"      tile_{name}[line * {width}u + d] = value;\n    }}\n"
        )
    lines.append(f"    workgroupBarrier();\n    for (var d = 0u; d < {chunk4}u; d++) {{\n")
    lines += [f"      let a{r} = tile_q[(ty * 4u + {r}u) * {width}u + d];\n" for r in range(4)]
    lines += [f"      let b{c} = tile_k[(tx + {c * across}u) * {width}u + d];\n" for c in range(4)]
    lines += [f"      s{r}_{c} += dot(a{r}, b{c});\n" for r in range(4) for c in range(4)]
    lines.append("    }\n    workgroupBarrier();\n  }\n")
    for r in range(4):
        for c in range(4):
            lines.append(f"  s{r}_{c} = score(batch, head, q0 + ty * 4u + {r}u, k0 + tx + {c * across}u, s{r}_{c});\n")
        best = f"max(max(s{r}_0, s{r}_1), max(s{r}_2, s{r}_3))"
        lines.append(f"  ladder[(ty * 4u + {r}u) * {across // 4}u + tx / 4u][tx % 4u] = {best};\n")
    lines.append("  workgroupBarrier();\n")
    for r in range(4):
        lines.append(f"  {{ var most = ladder[(ty * 4u + {r}u) * {across // 4}u];\n")
        lines += [
            f"  most = max(most, ladder[(ty * 4u + {r}u) * {across // 4}u + {j}u]);\n" for j in range(1, across // 4)
        ]
        lines.append(f"  let next = max(top{r}, max(max(most.x, most.y), max(most.z, most.w)));\n")
        lines.append(f"  let keep = weight(top{r}, next); top{r} = next; sum{r} *= keep;\n")
        lines += [f"  o{r}_{c} *= keep;\n" for c in range(columns)]
        for c in range(4):
            at = f"(ty * 4u + {r}u) * {weights_width}u + (tx + {c * across}u) / 4u"
            lines.append(
                f"  {{ let w = weight(s{r}_{c}, next); sum{r} += w; weights[{at}][(tx + {c * across}u) % 4u] = w; }}\n"
            )
        lines.append("  }\n")
    # Values, a few keys at a time.
    lines.append(f"  for (var j0 = 0u; j0 < {keys}u; j0 += {step}u) {{\n")
    lines.append(
        f"    workgroupBarrier();\n    for (var e = t; e < {step * vectors}u; e += {threads}u) {{\n"
        f"      let key = k0 + j0 + e / {vectors}u; var value = vec4<f32>();\n"
        f"      if (key < p.keys) {{ value = v4(batch, head, key, (e % {vectors}u) * 4u); }}\n"
        f"      tile_v[e] = value;\n    }}\n    workgroupBarrier();\n"
        f"    for (var j = 0u; j < {step}u; j += 4u) {{\n"
    )
    lines += [f"      let w{r} = weights[(ty * 4u + {r}u) * {weights_width}u + (j0 + j) / 4u];\n" for r in range(4)]
    for c in range(columns):
        lines.append(f"      {{ let column = min(tx + {c * across}u, {vectors - 1}u);\n")
        for u, axis in enumerate("xyzw"):
            lines.append(f"      let v{u} = tile_v[(j + {u}u) * {vectors}u + column];\n")
            lines += [f"      o{r}_{c} = fma(vec4<f32>(w{r}.{axis}), v{u}, o{r}_{c});\n" for r in range(4)]
        lines.append("      }\n")
    lines.append("    }\n  }\n  workgroupBarrier();\n  }\n")
    # Each thread has summed its own keys; the scaling was the same for all of a row.
    for r in range(4):
        lines.append(f"  ladder[(ty * 4u + {r}u) * {across // 4}u + tx / 4u][tx % 4u] = sum{r};\n")
    lines.append("  workgroupBarrier();\n  if (linear >= p.total) { return; }\n")
    for r in range(4):
        lines.append(f"  {{ let query = q0 + ty * 4u + {r}u;\n  var all = vec4<f32>();\n")
        lines += [f"  all += ladder[(ty * 4u + {r}u) * {across // 4}u + {j}u];\n" for j in range(across // 4)]
        lines.append(
            "  let total = all.x + all.y + all.z + all.w; var inverse = 0.0;\n"
            "  if (total > 0.0) { inverse = 1.0 / total; }\n  if (query < p.queries) {\n"
        )
        for c in range(columns):
            lines.append(
                f"    if (tx + {c * across}u < {vectors}u) "
                f"{{ put(batch, head, query, (tx + {c * across}u) * 4u, o{r}_{c} * inverse); }}\n"
            )
        lines.append(f"    if (tx == 0u) {{ put_sum(batch, head, query, top{r}, total); }}\n  }} }}\n")
    return "".join(lines) + "}\n"


# --- decoding with many keys -------------------------------------------------------------------------------------------


def _split(kernel: Attention) -> str:
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


def _join(kernel: Attention) -> str:
    """Lines are numbered as `split` does, which is batch, head, query."""
    vectors, threads = kernel.dimension // 4, kernel.threads
    parts = threads // vectors
    return (
        f"var<workgroup> ladder: array<vec2<f32>, {threads}>;\nvar<workgroup> outputs: array<vec4<f32>, {threads}>;\n"
        + main(kernel, "group.x + group.y * p.row")
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
