// Figures over all tuned choices. Pure.

export function summaryOf(graphs) {
  const gains = graphs.map((graph) => graph.speedup).filter(Number.isFinite).sort((a, b) => a - b);
  const middle = Math.floor(gains.length / 2);
  return {
    tried: graphs.reduce((sum, graph) => sum + graph.candidates.length, 0),
    median: gains.length ? (gains.length % 2 ? gains[middle] : (gains[middle - 1] + gains[middle]) / 2) : null,
    best: gains.length ? gains[gains.length - 1] : null,
  };
}
