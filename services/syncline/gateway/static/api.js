// The REST API as this page uses it: the token, problems as errors, pages, and events that go on where they broke off.
import { pause } from "./dom.js";

const SILENT = 45_000;  // ms; the gateway says something every 15 s, so a longer silence is a dead line
const here = path => new URL(path, document.baseURI);

/** What the gateway refused: RFC 9457's members, `errors` with path, message and hint. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || `the gateway answered ${status}`);
    this.name = "Problem";
    this.status = status;
    this.errors = body.errors || [];
    this.passes = status >= 500 || status === 429;  // what may well go better a little later
  }
}

let login = async () => false;
/** `ask(refused)` asks for a token and says whether one was given. */
export function onUnauthorized(ask) { login = ask; }

export const token = {
  get: () => { try { return sessionStorage.getItem("token"); } catch { return held; } },
  set: value => {
    held = value;
    try { if (value === null) sessionStorage.removeItem("token"); else sessionStorage.setItem("token", value); } catch { /* held */ }
  },
};
let held = null;

/** The answer to a request. Asks for a token on 401; throws `Problem` for a refusal. */
export async function request(path, options = {}) {
  for (;;) {
    const given = token.get();
    const headers = { ...options.headers, ...(given ? { authorization: `Bearer ${given}` } : {}) };
    const answer = await fetch(here(path), { ...options, headers, credentials: "omit", cache: "no-store" });
    if (answer.ok) return answer;
    if (answer.status === 401 && (given !== token.get() || await login(given !== null))) continue;
    let body = {};
    try { body = await answer.json(); } catch { /* not JSON: the status says enough */ }
    throw new Problem(answer.status, body);
  }
}

export const get = async (path, signal) => (await request(path, { signal })).json();

export async function post(path, body, headers = {}) {
  return (await request(path, { method: "POST", body, headers })).json();
}

/** Events after `cursor`, for as long as the job lasts: a broken line is taken up again with `Last-Event-ID`. */
export async function* events(path, cursor, signal, told) {
  let wait = 500;
  while (!signal.aborted) {
    const line = new AbortController(), cut = () => line.abort();
    signal.addEventListener("abort", cut, { once: true });
    try {
      const headers = cursor ? { "last-event-id": cursor } : {};
      const answer = await request(path, { headers, signal: line.signal });
      told("live");
      for await (const event of parsed(answer.body, line)) {
        wait = 500;
        cursor = event.id || cursor;
        yield event;
        if (event.name === "end") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && !error.passes) throw error;
    } finally {
      signal.removeEventListener("abort", cut);
      line.abort();
    }
    told("reconnecting");
    await pause(wait, signal);
    wait = Math.min(10_000, wait * 2);
  }
}

async function* parsed(body, line) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = { id: "", name: "", data: "" };
  for (;;) {
    const dead = setTimeout(() => line.abort(), SILENT);
    const { value, done } = await reader.read().finally(() => clearTimeout(dead));
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const text of lines) {
      if (text === "") {
        if (event.data) yield { ...event, data: JSON.parse(event.data) };
        event = { id: "", name: "", data: "" };
      } else {
        const [, field, said] = /^([a-z]*): ?(.*)$/.exec(text) || [];
        if (field === "id") event.id = said;
        else if (field === "event") event.name = said;
        else if (field === "data") event.data += said;
      }
    }
  }
}
