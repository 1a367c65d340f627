// Runs the scenario inside a browser page and posts the result to the page's own origin.
// The server under test is another origin, so every call goes through CORS.
import { run } from "./scenario.mjs";

const base = new URLSearchParams(location.search).get("server");
let result;
try {
  result = { origin: location.origin, value: await run(base) };
} catch (error) {
  result = { origin: location.origin, error: `${error}\n${error?.stack ?? ""}` };
}
await fetch("/result", { method: "POST", body: JSON.stringify(result) });
