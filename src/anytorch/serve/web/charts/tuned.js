// Figures over all tuned choices, and the words of one. Pure.

export function summaryOf(graphs) {
  const gains = graphs.map((graph) => graph.speedup).filter(Number.isFinite).sort((a, b) => a - b);
  const middle = Math.floor(gains.length / 2);
  return {
    tried: graphs.reduce((sum, graph) => sum + graph.candidates.length, 0),
    median: gains.length ? (gains.length % 2 ? gains[middle] : (gains[middle - 1] + gains[middle]) / 2) : null,
    best: gains.length ? gains[gains.length - 1] : null,
  };
}

/** Kernel graphs with a record, and every other choice. */
export function sorted(graphs) {
  const known = ({ picture }) => Boolean(picture);
  return { searched: graphs.filter(known), others: graphs.filter((graph) => !known(graph)) };
}

/** Candidates as a card shows them: rows from fast to slow, and those without a time, by the reason they share. */
export function ordered(candidates) {
  const timed = ({ seconds }) => Number.isFinite(seconds);
  const rows = candidates.filter((one) => timed(one) || one.chosen).sort((a, b) => (a.seconds ?? 0) - (b.seconds ?? 0));
  const rest = candidates.filter((one) => !rows.includes(one));
  return {
    rows,
    slowest: Math.max(0, ...rows.filter(timed).map(({ seconds }) => seconds)),
    refused: byReason(rest.filter(({ correct }) => !correct)),
    untimed: byReason(rest.filter(({ correct }) => correct)),
  };
}

function byReason(candidates) {
  const groups = new Map();
  for (const { name, reason } of candidates) {
    const words = (reason ?? "").replace(/^wrong: /, "");
    groups.set(words, [...(groups.get(words) ?? []), name]);
  }
  return [...groups].map(([reason, names]) => ({ reason, names }));
}

/** What one step of a program is, in words: a kernel's ops and schedule, or what torch computes. */
export function stepWords({ ops, schedule, text, source }) {
  if (source) return `${schedule}, ${source}`;
  return text ? `${ops.length === 1 ? ops[0] : `${ops.length} ops in one kernel`}, ${schedule}` : `${ops.join(", ")} by torch`;
}
