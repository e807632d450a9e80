"""The pointwise half of LSTM and GRU cells, all gates in one kernel. For `wgsl.per_element`: a thread per hidden unit.

Gates are laid out side by side along a row, in torch's order: input, forget, cell, output; reset, update, new.
"""

from __future__ import annotations

FUNCTIONS = """fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-clamp(x, -80.0, 80.0))); }
fn curve(x: f32) -> f32 { return tanh(clamp(x, -15.0, 15.0)); }
"""

PARAMETERS = ("hidden: u32",)
_WHERE = "  let row = i / p.hidden; let unit = i % p.hidden;\n"


def _sum(gates: int, gate: int, biased: bool) -> str:
    at = f"row * p.hidden * {gates}u + {gate}u * p.hidden + unit"
    total = f"load_x({at}) + load_h({at})"
    return f"{total} + load_xb({gate}u * p.hidden + unit) + load_hb({gate}u * p.hidden + unit)" if biased else total


def lstm(biased: bool) -> str:
    """Inputs x, h (gates), c (cell), with biases xb, hb; outputs hy, cy and the gates after their activations."""
    at = "row * p.hidden * 4u + unit"
    return (
        f"{_WHERE}  let input = sigmoid({_sum(4, 0, biased)});\n  let forget = sigmoid({_sum(4, 1, biased)});\n"
        f"  let cell = curve({_sum(4, 2, biased)});\n  let output = sigmoid({_sum(4, 3, biased)});\n"
        "  let cy = forget * load_c(i) + input * cell;\n  store_cy(i, cy); store_hy(i, output * curve(cy));\n"
        f"  store_gates({at}, input); store_gates({at} + p.hidden, forget);\n"
        f"  store_gates({at} + 2u * p.hidden, cell); store_gates({at} + 3u * p.hidden, output);"
    )


def lstm_backward(to_hidden: bool, to_cell: bool) -> str:
    """Inputs gates, c, cy and the gradients gh, gc that exist; outputs the gradients of the gates and of c."""
    at = "row * p.hidden * 4u + unit"
    gh = "load_gh(i)" if to_hidden else "0.0"
    gc = "load_gc(i)" if to_cell else "0.0"
    return (
        f"{_WHERE}  let a = {at}; let input = load_gates(a); let forget = load_gates(a + p.hidden);\n"
        "  let cell = load_gates(a + 2u * p.hidden); let output = load_gates(a + 3u * p.hidden);\n"
        f"  let bent = curve(load_cy(i)); let gh = {gh};\n"
        f"  let g = gh * output * (1.0 - bent * bent) + {gc};\n"
        "  store_to_gates(a, g * cell * (1.0 - input) * input);\n"
        "  store_to_gates(a + p.hidden, g * load_c(i) * (1.0 - forget) * forget);\n"
        "  store_to_gates(a + 2u * p.hidden, g * input * (1.0 - cell * cell));\n"
        "  store_to_gates(a + 3u * p.hidden, gh * bent * (1.0 - output) * output);\n"
        "  store_to_c(i, g * forget);"
    )


def gru(biased: bool) -> str:
    """Inputs x, h (gates), state; outputs hy and what the backward pass needs: reset, update, new, state, hidden part."""
    hidden = "load_h(row * p.hidden * 3u + 2u * p.hidden + unit)"
    incoming = "load_x(row * p.hidden * 3u + 2u * p.hidden + unit)"
    if biased:
        hidden += " + load_hb(2u * p.hidden + unit)"
        incoming += " + load_xb(2u * p.hidden + unit)"
    return (
        f"{_WHERE}  let reset = sigmoid({_sum(3, 0, biased)});\n  let update = sigmoid({_sum(3, 1, biased)});\n"
        f"  let inner = {hidden};\n  let fresh = curve({incoming} + reset * inner);\n"
        "  let state = load_state(i);\n  store_hy(i, fresh + update * (state - fresh));\n"
        "  let a = row * p.hidden * 5u + unit;\n  store_kept(a, reset); store_kept(a + p.hidden, update);\n"
        "  store_kept(a + 2u * p.hidden, fresh); store_kept(a + 3u * p.hidden, state); "
        "store_kept(a + 4u * p.hidden, inner);"
    )


GRU_BACKWARD = (
    f"{_WHERE}  let a = row * p.hidden * 5u + unit; let reset = load_kept(a); let update = load_kept(a + p.hidden);\n"
    "  let fresh = load_kept(a + 2u * p.hidden); let state = load_kept(a + 3u * p.hidden);\n"
    "  let inner = load_kept(a + 4u * p.hidden); let g = load_g(i);\n"
    "  let to_update = g * (state - fresh) * (1.0 - update) * update;\n"
    "  let to_fresh = g * (1.0 - update) * (1.0 - fresh * fresh);\n"
    "  let to_reset = to_fresh * inner * (1.0 - reset) * reset;\n"
    "  let b = row * p.hidden * 3u + unit;\n"
    "  store_to_x(b, to_reset); store_to_x(b + p.hidden, to_update); store_to_x(b + 2u * p.hidden, to_fresh);\n"
    "  store_to_h(b, to_reset); store_to_h(b + p.hidden, to_update); store_to_h(b + 2u * p.hidden, to_fresh * reset);\n"
    "  store_to_state(i, g * update);"
)
