// The page starts here: theme, key dialog, the service's state, and the panels, each built when it is first shown.

import { devicesPanel } from "../panels/devices.js";
import { benchmarkPanel } from "../panels/benchmark.js";
import { embeddingsPanel } from "../panels/embeddings.js";
import { forecastPanel } from "../panels/forecast.js";
import { generatePanel } from "../panels/generate.js";
import { graphsPanel } from "../panels/graphs.js";
import { onKeyNeeded } from "./api.js";
import { askForKey } from "./key-dialog.js";
import { watchService } from "./service-state.js";
import { startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";

// A panel is a function of its section that gives { show?, hide? }: what to do when it comes to the front or leaves.
const PANELS = {
  devices: devicesPanel,
  benchmark: benchmarkPanel,
  embeddings: embeddingsPanel,
  forecast: forecastPanel,
  generate: generatePanel,
  graphs: graphsPanel,
};
const built = {};

// A plain jump to #content would take the panel's name out of the address.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("content").focus();
});
startTheme(document.getElementById("theme"));
onKeyNeeded(askForKey);
watchService(document.getElementById("service"));
startTabs(document.querySelector('[role="tablist"]'), {
  show(name) {
    built[name] ??= PANELS[name](document.getElementById(`panel-${name}`)) ?? {};
    built[name].show?.();
  },
  hide(name) {
    built[name]?.hide?.();
  },
});
