// Shows the text that an output node of ours sends back ({"ui": {"text": [...]}}) on the node itself.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const OURS = ["PyTorch Custom"];
const NAME = "shown_text";

app.registerExtension({
  name: "anytorch.text",
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.output_node || !OURS.some((name) => nodeData.category?.startsWith(name))) return;
    const before = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      before?.apply(this, arguments);
      if (!message?.text) return;
      let widget = this.widgets?.find((one) => one.name === NAME);
      if (!widget) {
        widget = ComfyWidgets.STRING(this, NAME, ["STRING", { multiline: true }], app).widget;
        widget.serialize = false; // not part of the workflow
        widget.options.serialize = false;
        if (widget.inputEl) widget.inputEl.readOnly = true;
      }
      widget.value = message.text.join("\n");
      this.setDirtyCanvas?.(true, true);
    };
  },
});
