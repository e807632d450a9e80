// Shows words on our nodes: the text an output node sends back ({"ui": {"text": [...]}}), and the sentence of an error.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const CATEGORY = "PyTorch Custom";
const NAME = "shown_text";
const ours = new Set(); // the types of our nodes
const failed = new Set(); // nodes that show an error

function show(node, text) {
  let widget = node.widgets?.find((one) => one.name === NAME);
  if (!widget) {
    widget = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app).widget;
    widget.serialize = false; // not part of the workflow
    widget.options.serialize = false;
    if (widget.inputEl) widget.inputEl.readOnly = true;
  }
  widget.value = text;
  node.setDirtyCanvas?.(true, true);
}

function hide(node) {
  const widget = node.widgets?.find((one) => one.name === NAME);
  if (!widget) return;
  widget.onRemove?.();
  widget.element?.remove?.();
  node.widgets = node.widgets.filter((one) => one !== widget);
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "anytorch.text",
  async setup() {
    api.addEventListener("execution_start", () => {
      for (const node of failed) hide(node);
      failed.clear();
    });
    api.addEventListener("execution_error", ({ detail }) => {
      const node = ours.has(detail.node_type) && app.graph.getNodeById(Number(detail.node_id));
      if (!node) return;
      show(node, detail.exception_message.trim());
      failed.add(node);
    });
  },
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.category?.startsWith(CATEGORY)) return;
    ours.add(nodeData.name);
    if (!nodeData.output_node) return;
    const before = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      before?.apply(this, arguments);
      if (message?.text) show(this, message.text.join("\n"));
    };
  },
});
