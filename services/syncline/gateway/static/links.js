// Links to what the gateway serves by itself: plain where it asks for no token; fetched and kept as a file where it does.
import { request, token } from "./api.js";
import { el } from "./dom.js";

/** A link to `path`; with a token, a button that fetches it and saves it as `name`. */
export function opened(path, label, name) {
  if (token.get() === null) return el("a", { href: path, target: "_blank", rel: "noopener" }, label);
  const save = async () => {
    const kept = URL.createObjectURL(await (await request(path)).blob());
    el("a", { href: kept, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(kept), 10_000);
  };
  return el("button", { type: "button", onclick: save }, `${label} (save)`);
}
