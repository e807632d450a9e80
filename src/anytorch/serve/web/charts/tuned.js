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

/** Candidates as a card shows them: rows from fast to slow, and the names of those without a time. */
export function ordered(candidates) {
  const timed = ({ seconds }) => Number.isFinite(seconds);
  const rows = candidates.filter((one) => timed(one) || one.chosen).sort((a, b) => (a.seconds ?? 0) - (b.seconds ?? 0));
  const rest = candidates.filter((one) => !rows.includes(one));
  return {
    rows,
    slowest: Math.max(0, ...rows.filter(timed).map(({ seconds }) => seconds)),
    refused: rest.filter(({ correct }) => !correct).map(({ name }) => name),
    untimed: rest.filter(({ correct }) => correct).map(({ name }) => name),
  };
}
