// Server-sent events out of a fetch() body. EventSource would do it, but it can neither POST nor send a key.

/** Feed it pieces of text in any cut; it gives the events that are whole. Pure. See the WHATWG's "event stream". */
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];

  push(text) {
    const events = [];
    this.#rest += text;
    // A lone \r at the very end may be the first half of \r\n: wait for the next piece.
    const usable = this.#rest.endsWith("\r") ? this.#rest.slice(0, -1) : this.#rest;
    const lines = usable.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + this.#rest.slice(usable.length);
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push({ event: this.#name || "message", data: this.#data.join("\n") });
        this.#name = "";
        this.#data = [];
      } else if (!line.startsWith(":")) {
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "event") this.#name = value;
        else if (field === "data") this.#data.push(value);
      }
    }
    return events;
  }
}

/** The events of a response, as they arrive. Leaving the loop closes the connection, which stops the work behind it. */
export async function* readEvents(response) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      yield* parser.push(done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed or aborted: nothing is left to stop
  }
}
