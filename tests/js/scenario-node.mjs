// Runs the scenario in Node against the server named by the first argument and prints its result.
import { run } from "./scenario.mjs";

console.log(JSON.stringify(await run(process.argv[2])));
