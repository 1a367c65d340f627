// One walk through everything the published JavaScript client does, for Node and for a browser page.
// Returns plain data; tests/clients/ compares it with what must come out. It asserts nothing itself, so
// that the same expectations hold for both runtimes.
import { DurableStream, IdempotentProducer, stream } from "@durable-streams/client";

const DEADLINE_MS = 20_000;

/** Follows a stream to its end; `started` resolves with the first batch, so that writers need no sleep. */
function follow(url, live, options = {}) {
  const items = [];
  let seen;
  const started = new Promise((resolve) => (seen = resolve));
  const finished = (async () => {
    const response = await stream({ url, live, ...options, signal: AbortSignal.timeout(DEADLINE_MS) });
    const reader = (options.json ? response.jsonStream() : response.bodyStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      items.push(...(options.json ? [piece.value] : piece.value));
      seen();
    }
    return { items, closed: response.streamClosed };
  })();
  return { started, finished };
}

async function liveJson(base, live) {
  const url = `${base}/v1/stream/js/${live}-json`;
  const handle = await DurableStream.create({ url, contentType: "application/json" });
  await handle.append(JSON.stringify({ n: 0 }));
  const reader = follow(url, live, { json: true });
  await reader.started;
  for (let n = 1; n < 10; n++) await handle.append(JSON.stringify({ n }));
  await handle.close({ body: JSON.stringify({ n: 10 }) });
  return reader.finished;
}

async function liveBytes(base, live) {
  const url = `${base}/v1/stream/js/${live}-bytes`;
  const handle = await DurableStream.create({ url, contentType: "application/octet-stream" });
  const all = Uint8Array.from({ length: 256 }, (_, index) => index);
  await handle.append(all.subarray(0, 100));
  const reader = follow(url, live);
  await reader.started;
  await handle.append(all.subarray(100));
  await handle.close();
  return reader.finished;
}

async function catchUp(base) {
  const url = `${base}/v1/stream/js/catch-up`;
  const handle = await DurableStream.create({ url, contentType: "text/plain" });
  await handle.append("first ");
  const middle = (await handle.head()).offset;
  await handle.append("sécond");
  const whole = await (await stream({ url, live: false })).text();
  const rest = await (await stream({ url, live: false, offset: middle })).text();
  const head = await handle.head();
  return { whole, rest, contentType: head.contentType, offsetMoves: middle < head.offset };
}

async function producers(base) {
  const url = `${base}/v1/stream/js/producer`;
  const handle = await DurableStream.create({ url, contentType: "application/json" });
  const errors = [];
  const options = { autoClaim: true, lingerMs: 1, maxInFlight: 5, onError: (error) => errors.push(String(error)) };
  const first = new IdempotentProducer(handle, "worker", options);
  for (let n = 0; n < 500; n++) first.append(JSON.stringify({ n }));
  await first.flush();
  // A second producer of the same name takes over with a higher epoch; nothing is lost or doubled.
  const second = new IdempotentProducer(handle, "worker", { ...options, epoch: 1 });
  for (let n = 500; n < 1000; n++) second.append(JSON.stringify({ n }));
  await second.flush();
  await second.close();
  const items = await (await stream({ url, live: false, json: true })).json();
  return { errors, numbers: items.map((item) => item.n), closed: (await handle.head()).streamClosed };
}

async function refusals(base) {
  const url = `${base}/v1/stream/js/refusals`;
  const outcome = async (call) => {
    try {
      await call();
      return "ok";
    } catch (error) {
      return error.status ?? String(error);
    }
  };
  const missing = (await DurableStream.head({ url })).exists;
  const handle = await DurableStream.create({ url, contentType: "text/plain" });
  const conflict = await outcome(() => DurableStream.create({ url, contentType: "application/json" }));
  await handle.close();
  const closed = await outcome(() => handle.append("late"));
  await handle.delete();
  const deleted = (await handle.head()).exists;
  const deletedAgain = await outcome(() => handle.delete());
  return { missing, conflict, closed, deleted, deletedAgain };
}

export async function run(base) {
  return {
    catchUp: await catchUp(base),
    sseJson: await liveJson(base, "sse"),
    longPollJson: await liveJson(base, "long-poll"),
    sseBytes: await liveBytes(base, "sse"),
    longPollBytes: await liveBytes(base, "long-poll"),
    producers: await producers(base),
    refusals: await refusals(base),
  };
}
