// Starts the npm reference server, file-backed, and says where it listens.
// Arguments: module file of @durable-streams/server, data directory, port (0 picks one).
import { pathToFileURL } from "node:url"

const [modulePath, dataDir, port] = process.argv.slice(2)
const { DurableStreamTestServer } = await import(pathToFileURL(modulePath).href)
const server = new DurableStreamTestServer({ host: "127.0.0.1", port: Number(port), dataDir })
await server.start()
console.log(`listening on ${server.baseUrl ?? server.url} data=${dataDir}`)
